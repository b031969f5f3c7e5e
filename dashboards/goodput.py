"""The goodput board: what share of the time a run makes progress, and what takes the rest."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from opsd.dashboards.kit import TO_RUNBOOK, Column, Query, board, graph, label_variable, listing, number, row, timeline

ALL = 'cluster=~"$cluster"'
RUN = f'{ALL}, run=~"$run"'
USEFUL = "forward|backward|optimizer|collective"
OPENED = f"sum by (kind) (increase(opsd_incidents_opened_total{{{ALL}}}[7d]))"
LOST = f"sum by (kind) (increase(opsd_incidents_gpu_seconds_total{{{ALL}}}[7d]))"
OPEN_S = f"60 * sum by (kind) (sum_over_time(opsd_incidents{{{ALL}}}[7d:1m]))"
"""Seconds in which incidents were open, to the minute."""

BUCKETS = f"sum by (run, bucket) (rate(opsd_run_seconds_total{{{RUN}}}[1h])) > 0"
WALL = f"sum by (run) (rate(opsd_run_seconds_total{{{RUN}}}[1h]))"

NOW = row(
    "Now",
    number(
        "ETTR of the last hour",
        "Share of the wall clock in steps that were done for the first time, by the ledger. Needs agent.run_seconds.",
        "percentunit",
        Query(f'min(sum by (run) (rate(opsd_run_seconds_total{{{RUN}, bucket="productive"}}[1h])) / {WALL})'),
        width=4,
        empty="unknown",
    ),
    number(
        "Goodput of the last hour",
        "New steps of the last hour times the usual step time, divided by one hour.",
        "percentunit",
        Query(f"min(run:opsd_goodput:ratio_rate1h{{{RUN}}})"),
        width=5,
        empty="after 1 h",
    ),
    number(
        "Of its usual throughput",
        "Tokens/s divided by their median of the last six hours.",
        "percentunit",
        Query(f"min(run:opsd_rank_tokens:rate5m{{{RUN}}} / run:opsd_rank_tokens:usual6h{{{RUN}}})"),
        width=5,
    ),
    number(
        "Restarts of the last day",
        "New generations of ranks.",
        "none",
        Query(f"sum(max by (cluster, run) (changes(opsd_run_generation{{{RUN}}}[1d])))"),
        warn_above=1,
        bad_above=5,
        width=5,
    ),
    number(
        "GPUs on nodes with incidents",
        "GPUs of the run on nodes where an incident is open, symptoms included.",
        "none",
        Query(
            f"count(opsd_gpu_job_info{{{RUN}}} and on (cluster, instance) "
            f"sum by (cluster, instance) (opsd_incidents{{{ALL}}}) > 0) or vector(0)"
        ),
        bad_above=1,
        width=5,
    ),
)

OVER_TIME = row(
    "Over time",
    graph(
        "Goodput",
        "Over half an hour, an hour and six hours. Restarts, recomputed steps and slow ones lower it.",
        "percentunit",
        *(
            Query(f"run:opsd_goodput:ratio_rate{window}{{{RUN}}}", f"{{{{run}}}} {window}")
            for window in ("30m", "1h", "6h")
        ),
        top=1,
        empty="no run of half an hour",
    ),
    graph(
        "Phases without progress",
        "Share of the ranks' time in data, checkpoints, evaluation, setup and what is none of the phases.",
        "percentunit",
        Query(
            f'sum by (phase) (rate(opsd_rank_phase_seconds_total{{{RUN}, phase!~"{USEFUL}"}}[$__rate_interval])) '
            f"/ scalar(sum(rate(opsd_rank_phase_seconds_total{{{RUN}}}[$__rate_interval])))",
            "{{phase}}",
        ),
    ),
    graph(
        "Where the wall clock goes",
        "Share of each bucket of the ledger in the last hour; productive is the ETTR. Needs agent.run_seconds.",
        "percentunit",
        Query(f"({BUCKETS}) / on (run) group_left () {WALL}", "{{run}} {{bucket}}"),
        top=1,
        empty="set agent.run_seconds",
    ),
    timeline(
        "State",
        "Of the launchers of the run: a bar while it restarts, waits or stops.",
        Query(f'max by (run, state) (opsd_run_state{{{RUN}, state!="running"}}) > 0', "{{run}} {{state}}"),
        width=12,
        height=8,
        empty="all runs are running",
    ),
    graph(
        "Deviation of step times",
        "Standard deviation of the last step over the ranks, divided by its mean. Rising: a straggler.",
        "percentunit",
        Query(
            f"stddev by (run) (opsd_rank_step_seconds{{{RUN}}}) / avg by (run) (opsd_rank_step_seconds{{{RUN}}})",
            "{{run}}",
        ),
        width=24,
    ),
)

INCIDENTS = row(
    "Incidents of a week, by kind",
    listing(
        "Time between failures, time to repair, cost",
        "Opened in seven days, mean days between two, mean time that one stays open, symptoms included; "
        "GPU-time lost, symptoms left out.",
        Column("opened", f"{OPENED} > 0"),
        Column("days between", f"7 / ({OPENED} > 0)", "d"),
        Column("open for", f"{OPEN_S} / ({OPENED} > 0)", "s"),
        Column("GPU-time lost", f"{LOST} and ({OPENED} > 0)", "s"),
        links={"kind": {"runbook": TO_RUNBOOK}},
        width=24,
        empty="none opened in a week",
    ),
)


def build() -> dashboard.Dashboard:
    """Rows: now, over time, incidents."""
    return board(
        "opsd-goodput",
        "opsd / goodput",
        "Progress of runs and what costs it.",
        [label_variable("run", "Run", "opsd_run_up", within=ALL)],
        within=ALL,
        rows=(NOW, OVER_TIME, INCIDENTS),
    )
