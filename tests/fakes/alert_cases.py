"""Series that raise each alert, and the nearest ones that do not, in the notation of promtool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Series = Mapping[str, str]

NODE = 'instance="node-17:9477"'
GPU = f'{NODE},gpu="3"'
RUN = 'run="train"'
RUNNING = {f'opsd_run_state{{{NODE},{RUN},state="running"}}': "1x2000", f"opsd_run_up{{{NODE},{RUN}}}": "1x2000"}


@dataclass(frozen=True)
class Case:
    """Series (in promtool's notation, a value every 15 s) of which each set in ``fires`` raises the alert ``at``."""

    fires: Sequence[Series]
    quiet: Sequence[Series]
    at: str = "10m"


def steps(a_minute: float, minutes: int, then: float | None = None) -> Series:
    """A run whose steps take 1 s, at a pace, and at another pace after some ``minutes``; a value every minute."""
    pace = f"0+{a_minute}x{minutes}" + ("" if then is None else f" {a_minute * minutes}+{then}x6000")
    return {
        f"opsd_rank_step{{{NODE},{RUN}}}": pace,
        f"opsd_rank_step_seconds{{{NODE},{RUN}}}": "1x10000",
        f'opsd_run_state{{{NODE},{RUN},state="running"}}': "1x10000",
    }


def forecast(seconds: str) -> Series:
    """A run that was planned for 100,000 s, and is expected to end later by its restarts."""
    return {
        f"opsd_run_planned_seconds{{{NODE},{RUN}}}": "100000x400",
        f"opsd_run_forecast_seconds{{{NODE},{RUN}}}": seconds,
        f'opsd_run_beyond_plan_seconds{{{NODE},{RUN},bucket="restart"}}': "20000x400",
        f'opsd_run_beyond_plan_seconds{{{NODE},{RUN},bucket="other"}}': "10x400",
    }


def full(node: int, severity: str = "critical", state: str = "open", mount: str = "/results") -> Series:
    """An incident of a file system that is full; ``mount`` is "" if it is none of the network."""
    where = f'instance="node-{node}:9477",kind="storage_full",severity="{severity}",state="{state}",mount="{mount}"'
    return {f"opsd_incidents{{{where}}}": "1x50"}


CASES: Mapping[str, Case] = {
    "ImexNotReady": Case(
        [{f"opsd_imex_state{{{NODE}}}": "2x50"}, {f"opsd_imex_state{{{NODE}}}": "5x10 7x40"}],
        [{f"opsd_imex_state{{{NODE}}}": "5x50"}, {f"opsd_imex_state{{{NODE}}}": "2x10 5x40"}],
    ),
    "RunUnsupervised": Case(
        [{**RUNNING, f"opsd_run_up{{{NODE},{RUN}}}": "1x30 0x20"}],
        [
            RUNNING,
            {
                f'opsd_run_state{{{NODE},{RUN},state="running"}}': "0x50",
                f'opsd_run_state{{{NODE},{RUN},state="finished"}}': "1x50",
                f"opsd_run_up{{{NODE},{RUN}}}": "0x50",
            },
        ],
    ),
    "AgentSilent": Case([{f'up{{{NODE},job="opsd"}}': "1x30 0x20"}], [{f'up{{{NODE},job="opsd"}}': "1x50"}]),
    "AgentMissing": Case([{'up{instance="x",job="node"}': "1x50"}], [{f'up{{{NODE},job="opsd"}}': "0x50"}]),
    "CollectorBlind": Case(
        [
            {f'opsd_collector_state{{{NODE},collector="host",state="error"}}': "1x50"},
            {f'opsd_collector_state{{{NODE},collector="host",state="hung"}}': "1x50"},
        ],
        [
            {f'opsd_collector_state{{{NODE},collector="host",state="no_data"}}': "1x50"},
            {f'opsd_collector_state{{{NODE},collector="host",state="error"}}': "0x50"},
        ],
    ),
    "CollectorLimited": Case(
        [{f'opsd_collector_state{{{NODE},collector="ranks",state="limited"}}': "1x50"}],
        [{f'opsd_collector_state{{{NODE},collector="ranks",state="limited"}}': "0x50"}],
    ),
    "AgentSlow": Case(
        [{f"opsd_agent_missed_ticks_total{{{NODE}}}": "0+6x60"}],
        [{f"opsd_agent_missed_ticks_total{{{NODE}}}": "0+1x60"}],
        at="12m",
    ),
    "JournalDown": Case([{f"opsd_journal_up{{{NODE}}}": "0x50"}], [{f"opsd_journal_up{{{NODE}}}": "1x50"}]),
    "PrologBlind": Case(
        [{f'opsd_prolog_verdict{{{NODE},verdict="unknown"}}': "1x50"}],
        [{f'opsd_prolog_verdict{{{NODE},verdict="unknown"}}': "0x50"}],
    ),
    "NodeToReplace": Case(
        [
            {f'opsd_repair_state{{{NODE},state="rma"}}': "1x50"},
            {
                f'opsd_repair_state{{{NODE},state="rma"}}': "1x50",
                f'opsd_slurm_node_flag{{{NODE},flag="drain"}}': "1x50",
            },
        ],
        [
            {f'opsd_repair_state{{{NODE},state="left"}}': "1x50"},
            {
                f'opsd_repair_state{{{NODE},state="rma"}}': "1x50",
                f'opsd_slurm_node_flag{{{NODE},flag="drain"}}': "0x50",
            },
        ],
    ),
    "LemonNode": Case(
        [{f"opsd_node_lemon{{{NODE}}}": "1x50"}],
        [{f"opsd_node_lemon{{{NODE}}}": "0x50"}, {}],
    ),
    "RepairLeft": Case(
        [
            {
                f'opsd_repair_state{{{NODE},state="left"}}': "1x250",
                f'opsd_slurm_node_reason_info{{{NODE},reason="opsd:gpu_xid-1 gpu_xid: x",reason_by="root"}}': "1x250",
            },
        ],
        [
            {f'opsd_repair_state{{{NODE},state="left"}}': "1x250"},
            {
                f'opsd_repair_state{{{NODE},state="left"}}': "1x250",
                f'opsd_slurm_node_reason_info{{{NODE},reason="mine",reason_by="ann"}}': "1x250",
            },
            {
                f'opsd_repair_state{{{NODE},state="rma"}}': "1x250",
                f'opsd_slurm_node_reason_info{{{NODE},reason="opsd:rma gpu_xid: x",reason_by="root"}}': "1x250",
            },
        ],
        at="40m",
    ),
    "RepairStuck": Case(
        [
            {f"opsd_repair_age_seconds{{{NODE}}}": "22000+15x250"},
            {f"opsd_repair_age_seconds{{{NODE}}}": "22000+15x250", f"opsd_slurm_jobs{{{NODE}}}": "0x250"},
        ],
        [
            {f"opsd_repair_age_seconds{{{NODE}}}": "600+15x250"},
            {f"opsd_repair_age_seconds{{{NODE}}}": "22000+15x250", f"opsd_slurm_jobs{{{NODE}}}": "1x250"},
            {
                f"opsd_repair_age_seconds{{{NODE}}}": "22000+15x250",
                f'opsd_repair_state{{{NODE},state="paused"}}': "1x250",
            },
            {f"opsd_repair_age_seconds{{{NODE}}}": "22000+15x20 _x230"},
        ],
        at="40m",
    ),
    "ConfigRefused": Case(
        [{f"opsd_config_last_reload_successful{{{NODE}}}": "0x50"}],
        [{f"opsd_config_last_reload_successful{{{NODE}}}": "1x50"}],
    ),
    "AgentCrowded": Case(
        [{f'opsd_http_refused_total{{{NODE},reason="slow"}}': "0+120x60"}],
        [
            {f'opsd_http_refused_total{{{NODE},reason="slow"}}': "0+6x60"},
            {f'opsd_http_refused_total{{{NODE},reason="host"}}': "0+120x60"},
        ],
        at="12m",
    ),
    "RunbookFailing": Case(
        [{f'opsd_runbook_errors_total{{{NODE},kind="gpu_ecc"}}': "0x30 1x20"}],
        [{f'opsd_runbook_errors_total{{{NODE},kind="gpu_ecc"}}': "1x50"}],
    ),
    "KernelLogLost": Case(
        [{f'opsd_kmsg_dropped_total{{{NODE},reason="overrun"}}': "0x30 5x20"}],
        [{f'opsd_kmsg_dropped_total{{{NODE},reason="overrun"}}': "5x50"}],
    ),
    "ExporterDoubtful": Case(
        [{f"opsd_dcgm_untrusted{{{NODE}}}": "1x50"}, {f"opsd_dcgm_disagreements{{{NODE}}}": "2x50"}],
        [{f"opsd_dcgm_untrusted{{{NODE}}}": "0x50", f"opsd_dcgm_disagreements{{{NODE}}}": "0x50"}],
    ),
    "RankPagesBroken": Case(
        [{f"opsd_rank_page_errors{{{NODE},{RUN}}}": "1x50"}], [{f"opsd_rank_page_errors{{{NODE},{RUN}}}": "0x50"}]
    ),
    "SparePoolEmpty": Case(
        [
            {f"opsd_spare_ready{{{NODE}}}": "0x50"},
            {f"opsd_spare_ready{{{NODE}}}": "1x50", f'opsd_rank_up{{{NODE},{RUN},rank="0"}}': "1x50"},
        ],
        [
            {f"opsd_spare_ready{{{NODE}}}": "1x50", f'opsd_rank_up{{{NODE},{RUN},rank="0"}}': "0x50"},
            {f"opsd_spare_ready{{{NODE}}}": "0x50", 'opsd_spare_ready{instance="node-18:9477"}': "1x50"},
            {f"opsd_slurm_up{{{NODE}}}": "1x50"},
        ],
    ),
    "PlanExceeded": Case(
        [forecast("100000x30 120000x400"), forecast("110001x400")],
        [forecast("110000x400"), forecast("90000x400"), {f"opsd_run_forecast_seconds{{{NODE},{RUN}}}": "120000x400"}],
        at="70m",
    ),
    "StorageFull": Case(
        [full(17, mount="")],
        [full(17, mount="", state="acknowledged")],
    ),
    "SlurmSilent": Case([{f"opsd_slurm_up{{{NODE}}}": "0x50"}], [{f"opsd_slurm_up{{{NODE}}}": "1x50"}]),
    "IncidentEscalated": Case(
        [{f'opsd_incidents{{{NODE},kind="gpu_lost",severity="critical",state="escalated"}}': "1x50"}],
        [{f'opsd_incidents{{{NODE},kind="gpu_lost",severity="critical",state="acting"}}': "1x50"}],
    ),
    "ActionFailed": Case(
        [{f'opsd_actions_total{{{NODE},verb="drain_node",outcome="failed"}}': "0x30 1x20"}],
        [{f'opsd_actions_total{{{NODE},verb="drain_node",outcome="ok"}}': "0x30 1x20"}],
    ),
}
SHARED: Mapping[str, Case] = {
    "StorageFull": Case(
        [{**full(17), **full(18)}, {**full(17, "warning"), **full(18)}],
        [{**full(17, state="acknowledged"), **full(18)}, full(17, state="symptom")],
    ),
}
"""Cases of alerts that are told once for a cluster, beside one of the same name that each node has."""

BURNS: Mapping[str, Case] = {
    "1h": Case([steps(60, 120, then=0)], [steps(60, 120, then=40), steps(60, 200)], at="175m"),
    "6h": Case([steps(60, 480, then=36)], [steps(60, 480, then=48)], at="14h"),
    "3d": Case([steps(60, 480, then=54)], [steps(60, 480, then=58.2)], at="81h"),
}
"""Goodput: nothing for an hour, 60 % for six hours, 90 % for three days; not two thirds, 80 % or 97 %."""
