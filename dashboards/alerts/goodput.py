"""Goodput of runs, and the alerts on its budget.

Goodput is the time that a run's new steps would have taken at its usual pace, divided by the elapsed time. Steps
repeated after a failure are not new; slow steps, restarts and stalls count as loss. Each new run has a new name, so
that the highest step of a name never falls.
"""

from __future__ import annotations

from opsd.dashboards.alerts.model import Alert, Group, RecordingRule
from opsd.runbooks.base import Guide

OBJECTIVE = 0.95
"""The service level objective of a run's goodput."""
WINDOWS = ("5m", "30m", "1h", "6h", "3d")
_SECONDS = {"m": 60, "h": 3600, "d": 86_400}


GUIDE = Guide.parse("""
# A run makes too little progress

## Meaning
Goodput is below the run's objective, over a short and a long window. Goodput is the number of new steps times the usual
step time, divided by the elapsed time; steps repeated after a failure are not new. The label `window` is the longer
window and the urgency: 1h is a page, 6h is for today, 3d is for this week.

## Impact
GPU-hours are lost. At 14.4 times the budget, a month's error budget is used up in two days.

## Diagnosis
1. The job board: is the run down, does it restart repeatedly, or is it slow?
2. `opsd incidents` on its nodes: root causes with their symptoms, and the cost of each.
3. `opsd ledger RUN_DIR`: which bucket grows: recomputed, restart, checkpoint_stall, data_stall?
4. `opsd diagnose` while it is slow: data, network or kernels.

## Mitigation
- Restarts: follow the runbook of the incident that keeps coming back.
- Recomputed steps: save more often, or find out why checkpoints are rejected (`opsd checkpoint list FOLDER`).
- Slow steps: `opsd runbook show throughput_drop`.

## What opsd does by itself
- observe, recommend: only what it does about the incidents that are the cause.
- act: the actions in the runbooks of those incidents.
""")


LATE = Guide.parse("""
# A run will end later than planned

## Meaning
The plan of the run (plan.json in its folder, written by `opsd plan --run`) is exceeded by more than a tenth, by the
forecast of its ledger: what is left goes as the run has gone so far. The message names the bucket that exceeds the plan
most; productive means that steps themselves are slower than planned.

## Impact
The nodes are needed for longer than they were asked for, and the model is late.

## Diagnosis
1. `opsd report RUN_DIR --text`: days left, the ETTR at the end, and how far each bucket is beyond the plan.
2. `opsd plan CONFIG --gpus N --measured RUN_DIR`: the plan with what the run has measured; are its figures wrong?
3. By bucket: recomputed and restart are failures (`opsd incidents` on its nodes), checkpoint_stall is storage,
   data_stall the loader, other is evaluation, queued the queue, productive the speed of steps.

## Mitigation
- Failures: swap the node that keeps failing; have as many spares as the report advises.
- productive: `opsd runbook show throughput_drop`.
- A plan that was wrong: make it again with --measured and --run, and tell those who wait for the model.

## What opsd does by itself
- observe, recommend: only what it does about the incidents that are the cause.
- act: the actions in the runbooks of those incidents.
""")


def _late() -> Alert:
    """The forecast is a tenth beyond the plan."""
    bucket = (
        '{{ with query (printf "topk(1, max by (bucket) (opsd_run_beyond_plan_seconds{cluster=%q, run=%q}))" '
        '$labels.cluster $labels.run) }}{{ . | first | label "bucket" }}{{ end }}'
    )
    return Alert(
        "PlanExceeded",
        "max by (cluster, run) (opsd_run_forecast_seconds) / max by (cluster, run) (opsd_run_planned_seconds) > 1.1",
        scope="run",
        severity="warning",
        hold="30m",
        summary=f"Run {{{{ $labels.run }}}} is expected to take {{{{ $value | humanizePercentage }}}} of the time "
        f"planned for it, more than planned above all in the bucket {bucket}",
        description="By the forecast of its ledger the run exceeds its plan by more than a tenth.",
        guide=LATE,
    )


def _goodput(window: str) -> RecordingRule:
    highest, usual = "run:opsd_rank_step:highest1d", "run:opsd_rank_step_seconds:usual1d"
    new = f"({highest} - {highest} offset {window})"
    seconds = int(window[:-1]) * _SECONDS[window[-1]]
    return RecordingRule(
        f"run:opsd_goodput:ratio_rate{window}",
        f"clamp({new} * {usual} / {seconds}, 0, 1)\n  and on (cluster, run) run:opsd_run_unfinished:max",
    )


def _burn(short: str, long: str, factor: float) -> Alert:
    """The burn rate is above ``factor`` in both windows (The Site Reliability Workbook, chapter 5, table 5-8)."""
    level = f"{1 - factor * (1 - OBJECTIVE):.4g}"
    return Alert(
        "GoodputBurn",
        f"run:opsd_goodput:ratio_rate{short} < {level}\n  and\nrun:opsd_goodput:ratio_rate{long} < {level}",
        scope="run",
        severity="critical" if factor > 1 else "warning",
        window=long,
        summary=f"Run {{{{ $labels.run }}}} makes only {{{{ $value | humanizePercentage }}}} of its usual progress "
        f"over {short}, and is also low over {long}",
        description=f"The run uses up the error budget of its {OBJECTIVE:.0%} goodput objective "
        f"at {factor:g} times the sustainable rate.",
        guide=GUIDE,
    )


GOODPUT = Group(
    "goodput",
    (
        RecordingRule(
            "run:opsd_run_unfinished:max", 'max by (cluster, run) (opsd_run_state{state=~"running|restarting"}) == 1'
        ),
        RecordingRule("run:opsd_rank_step:max", "max by (cluster, run) (opsd_rank_step)"),
        RecordingRule("run:opsd_rank_step:highest1d", "max_over_time(run:opsd_rank_step:max[1d])"),
        RecordingRule("run:opsd_rank_step_seconds:median", "quantile by (cluster, run) (0.5, opsd_rank_step_seconds)"),
        RecordingRule(
            "run:opsd_rank_step_seconds:usual1d", "quantile_over_time(0.25, run:opsd_rank_step_seconds:median[1d])"
        ),
        *(_goodput(window) for window in WINDOWS),
        _burn("5m", "1h", 14.4),
        _burn("30m", "6h", 6),
        _burn("6h", "3d", 1),
        _late(),
    ),
    interval="1m",
)
