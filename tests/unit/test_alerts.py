"""The alerts: current, explained, and each fires when it should and only then.

The rules are run by promtool on series of this file; it is skipped by name where promtool is not installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("yaml")

import yaml

from dashboards.alerts.build import FOLDER, GROUPS, alerts, rendered
from dashboards.alerts.model import Record, incident
from opsd.agent.metrics_cli import catalogue
from opsd.cli import cli
from runbooks import RUNBOOKS
from runbooks.alert_pages import PAGES

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed"
)
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


CASES: Mapping[str, Case] = {
    "GpuLost": Case([{f"opsd_gpu_up{{{GPU}}}": "1x38 0x4"}], [{f"opsd_gpu_up{{{GPU}}}": "1x50"}]),
    "DriverHang": Case(
        [{f'opsd_collector_state{{{NODE},collector="nvml",state="hung"}}': "0x30 1x20"}],
        [
            {f'opsd_collector_state{{{NODE},collector="nvml",state="hung"}}': "0x50"},
            {f'opsd_collector_state{{{NODE},collector="nfs",state="hung"}}': "1x50"},
        ],
    ),
    "GpuThrottle": Case(
        [{f'opsd_gpu_throttle_seconds_total{{{GPU},reason="hw_thermal"}}': "0x38 0+15x10"}],
        [
            {f'opsd_gpu_throttle_seconds_total{{{GPU},reason="hw_thermal"}}': "0+1x50"},
            {f'opsd_gpu_throttle_seconds_total{{{GPU},reason="sw_power_cap"}}': "0+15x50"},
        ],
    ),
    "GpuXid": Case(
        [
            {
                f'opsd_xid_total{{{NODE},pci_bus_id="0000:1A",code="79"}}': "0x35 1x10",
                f'opsd_gpu_info{{{GPU},pci_bus_id="0000:1A"}}': "1x50",
            },
            {f'opsd_xid_total{{{NODE},pci_bus_id="0000:1A",code="48"}}': "0x35 1x10"},
            {f'opsd_incidents{{{NODE},kind="gpu_xid",severity="critical",state="open"}}': "1x50"},
        ],
        [
            {f'opsd_xid_total{{{NODE},pci_bus_id="0000:1A",code="13"}}': "0x35 1x10"},
            {f'opsd_xid_total{{{NODE},pci_bus_id="0000:1A",code="79"}}': "3x50"},
        ],
    ),
    "GpuEcc": Case(
        [
            {f'opsd_gpu_ecc_errors_total{{{GPU},type="uncorrected",counter="volatile"}}': "0x30 1x20"},
            {f'opsd_gpu_ecc_errors_total{{{GPU},type="corrected",counter="volatile"}}': "0x36 0+60x10"},
        ],
        [
            {f'opsd_gpu_ecc_errors_total{{{GPU},type="corrected",counter="volatile"}}': "0+1x50"},
            {f'opsd_gpu_ecc_errors_total{{{GPU},type="uncorrected",counter="aggregate"}}': "0x30 1x20"},
        ],
    ),
    "GpuRowRemap": Case(
        [{f"opsd_gpu_row_remap_pending{{{GPU}}}": "1x50"}, {f"DCGM_FI_DEV_ROW_REMAP_FAILURE{{{GPU}}}": "1x50"}],
        [{f"opsd_gpu_row_remap_pending{{{GPU}}}": "0x50", f"DCGM_FI_DEV_ROW_REMAP_FAILURE{{{GPU}}}": "0x50"}],
    ),
    "NvlinkErrors": Case(
        [
            {f'opsd_gpu_nvlink_errors_total{{{GPU},type="recovery"}}': "0x30 1x20"},
            {f'opsd_gpu_nvlink_errors_total{{{GPU},type="crc_data"}}': "0x30 0+20x20"},
            {f'opsd_gpu_nvlink_up{{{GPU},link="4"}}': "0x50"},
        ],
        [
            {f'opsd_gpu_nvlink_errors_total{{{GPU},type="crc_flit"}}': "0+20x50"},
            {f'opsd_gpu_nvlink_up{{{GPU},link="4"}}': "1x36 0x2 1x10"},
        ],
    ),
    "FabricManager": Case(
        [{f"opsd_gpu_fabric_state{{{GPU}}}": "2x50"}, {f'opsd_gpu_fabric_problem{{{GPU},problem="x"}}': "1x50"}],
        [{f"opsd_gpu_fabric_state{{{GPU}}}": "3x50"}, {f"opsd_gpu_fabric_state{{{GPU}}}": "0x50"}],
    ),
    "PcieDegraded": Case(
        [
            {f"opsd_gpu_pcie_link_width{{{GPU}}}": "8x50", f"opsd_gpu_pcie_link_width_max{{{GPU}}}": "16x50"},
            {f"DCGM_FI_DEV_PCIE_REPLAY_COUNTER{{{GPU}}}": "0+60x50"},
        ],
        [
            {f"opsd_gpu_pcie_link_width{{{GPU}}}": "16x50", f"opsd_gpu_pcie_link_width_max{{{GPU}}}": "16x50"},
            {f"DCGM_FI_DEV_PCIE_REPLAY_COUNTER{{{GPU}}}": "0+1x50"},
        ],
    ),
    "HostMemory": Case(
        [{f"opsd_host_memory_available_bytes{{{NODE}}}": "2x50", f"opsd_host_memory_total_bytes{{{NODE}}}": "100x50"}],
        [{f"opsd_host_memory_available_bytes{{{NODE}}}": "5x50", f"opsd_host_memory_total_bytes{{{NODE}}}": "100x50"}],
    ),
    "StorageFull": Case(
        [
            {
                f'opsd_host_filesystem_available_bytes{{{NODE},mount="/"}}': "4x50",
                f'opsd_host_filesystem_size_bytes{{{NODE},mount="/"}}': "100x50",
            },
            {
                f'opsd_host_filesystem_inodes_free{{{NODE},mount="/"}}': "1x50",
                f'opsd_host_filesystem_inodes{{{NODE},mount="/"}}': "100x50",
            },
        ],
        [
            {
                f'opsd_host_filesystem_available_bytes{{{NODE},mount="/"}}': "6x50",
                f'opsd_host_filesystem_size_bytes{{{NODE},mount="/"}}': "100x50",
            }
        ],
    ),
    "ThroughputDrop": Case(
        [{**RUNNING, f"opsd_rank_tokens_total{{{NODE},{RUN}}}": "0+1000x200 200000+500x200"}],
        [
            {**RUNNING, f"opsd_rank_tokens_total{{{NODE},{RUN}}}": "0+1000x200 200000+900x200"},
            {f"opsd_rank_tokens_total{{{NODE},{RUN}}}": "0+1000x200 200000+0x200"},
        ],
        at="60m",
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
    "AgentSlow": Case(
        [{f"opsd_agent_missed_ticks_total{{{NODE}}}": "0+6x60"}],
        [{f"opsd_agent_missed_ticks_total{{{NODE}}}": "0+1x60"}],
        at="12m",
    ),
    "JournalDown": Case([{f"opsd_journal_up{{{NODE}}}": "0x50"}], [{f"opsd_journal_up{{{NODE}}}": "1x50"}]),
    "RunbookFailing": Case(
        [{f'opsd_runbook_errors_total{{{NODE},kind="gpu_ecc"}}': "0x30 1x20"}],
        [{f'opsd_runbook_errors_total{{{NODE},kind="gpu_ecc"}}': "1x50"}],
    ),
    "KernelLogLost": Case(
        [{f'opsd_kmsg_dropped_total{{{NODE},reason="overrun"}}': "0x30 5x20"}],
        [{f'opsd_kmsg_dropped_total{{{NODE},reason="overrun"}}': "5x50"}],
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
BURNS: Mapping[str, Case] = {
    "1h": Case([steps(60, 120, then=0)], [steps(60, 120, then=40), steps(60, 200)], at="175m"),
    "6h": Case([steps(60, 480, then=36)], [steps(60, 480, then=48)], at="14h"),
    "3d": Case([steps(60, 480, then=54)], [steps(60, 480, then=58.2)], at="81h"),
}
"""Goodput: nothing for an hour, 60 % for six hours, 90 % for three days; not two thirds, 80 % or 97 %."""


def case_of(name: str, page: str) -> Case:
    """Of alerts about incidents there is one for each kind, and they differ in nothing else."""
    if name in CASES:
        return CASES[name]
    series = f'opsd_incidents{{{NODE},kind="{page}",severity="critical",state="acting"}}'
    other = f'opsd_incidents{{{NODE},kind="another",severity="critical",state="acting"}}'
    return Case([{series: "0x30 1x20"}], [{series: "1x30 0x20", other: "1x50"}])


def promtool_group(
    series: Series, at: str, selector: str, expected: Sequence[str], name: str, interval: str
) -> dict[str, object]:
    return {
        "name": name,
        "interval": interval,
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f"count by (alertname, severity, alertstate) (ALERTS{{{selector}}})",
                "eval_time": at,
                "exp_samples": [{"labels": labels, "value": 1} for labels in expected],
            }
        ],
    }


def groups_of(
    name: str, severity: str | None, case: Case, extra: str = "", interval: str = "15s"
) -> list[dict[str, object]]:
    selector = f'alertname="{name}"{extra}'
    fired = f'{{alertname="{name}",alertstate="firing",severity="{severity or "critical"}"}}'
    said = [("fires", [fired], case.fires), ("is quiet", [], case.quiet)]
    return [
        promtool_group(series, case.at, selector, expected, f"{name} {what} {number}", interval)
        for what, expected, every in said
        for number, series in enumerate(every)
    ]


def promtool(folder: Path, groups: Sequence[dict[str, object]], rules: Iterable[Path] = tuple(rendered())) -> str:
    """What promtool says of the tests, "" if they pass."""
    file = folder / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(path) for path in rules], "tests": list(groups)}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_committed_rules_are_what_the_code_makes() -> None:
    """Nobody edits the YAML by hand, nobody forgets to build it, and no file is left over."""
    assert {path: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.yml")} == rendered()


def test_alerts_and_pages_are_a_bijection() -> None:
    """Every kind of incident has its alert, every alert its page, and the URL leads to that page."""
    pages = {alert.page for alert in alerts()}
    assert pages == {runbook.kind for runbook in RUNBOOKS} | set(PAGES)
    for alert in alerts():
        assert alert.as_rule()["annotations"]["runbook_url"].endswith(f"/runbooks/{alert.page}")


def test_every_alert_is_tested_by_hand_or_is_about_an_incident() -> None:
    """A new alert without a test fails here, and so does a test of an alert that is gone."""
    of_incidents = {alert.name for alert in alerts() if alert.expr == incident(alert.page)}
    burns = {alert.window for alert in alerts() if alert.name == "GoodputBurn"}
    assert {alert.name for alert in alerts()} == of_incidents | set(CASES) | {"GoodputBurn"}
    assert of_incidents & set(CASES) == set()
    assert burns == set(BURNS)


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name + alert.window)
def test_an_alert_says_all_that_the_person_on_call_needs(alert) -> None:
    """Summary, description, severity, how long it must hold, what to do next; node and GPU where it is about one."""
    rule = alert.as_rule()
    assert rule["for"].endswith(("s", "m"))
    assert rule.get("labels", {}).get("severity") or "severity)" in alert.expr
    promised = {"summary", "description", "next_step", "runbook_url"}
    promised |= {"gpu": {"node", "gpu", "job", "cost"}, "node": {"node", "job", "cost"}, "run": {"job", "cost"}}.get(
        alert.scope, set()
    )
    assert promised <= rule["annotations"].keys()


def test_rules_use_only_series_that_exist() -> None:
    """A rule about a series that nobody writes would be silent for ever."""
    exported = {metric.name for _, metric in catalogue()}
    rules = [rule for group in GROUPS for rule in group.rules]
    recorded = {rule.name for rule in rules if isinstance(rule, Record)}
    for rule in rules:
        words = set(re.findall(r"(?<![\w:])(?:opsd|DCGM_FI)_\w+", rule.expr))
        levels = set(re.findall(r"\b(?:instance|run|cluster)\w*:[\w:]+", rule.expr))
        assert (words - exported, levels - recorded) == (set(), set()), rule.name


def test_the_command_writes_and_checks_the_rules(tmp_path: Path) -> None:
    """Into any folder; a file that was changed is named, and the exit code says so."""
    folder = tmp_path / "rules"
    assert CliRunner().invoke(cli, ["alerts", "build", "--out", str(folder)]).exit_code == 0
    assert CliRunner().invoke(cli, ["alerts", "check", "--out", str(folder)]).exit_code == 0
    (folder / "data.yml").write_text("groups: []")
    checked = CliRunner().invoke(cli, ["alerts", "check", "--out", str(folder)])
    assert checked.exit_code == 1
    assert "data.yml is not current; run: opsd alerts build" in checked.output


@needs_promtool
def test_promtool_finds_nothing_wrong() -> None:
    """Not even what is only bad style."""
    files = [str(path) for path in rendered()]
    checked = subprocess.run(
        ["promtool", "check", "rules", "--lint=all", "--lint-fatal", *files],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


@needs_promtool
def test_every_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    """Each branch of each expression, and the nearest thing that is no reason to wake somebody."""
    tests = [
        group
        for alert in alerts()
        if alert.name != "GoodputBurn"
        for group in groups_of(alert.name, alert.severity, case_of(alert.name, alert.page))
    ]
    assert promtool(tmp_path, tests) == ""


@needs_promtool
@pytest.mark.slow
def test_goodput_is_watched_over_short_and_long_windows(tmp_path: Path) -> None:
    """A run that stands still pages within the hour; one that loses a little is noticed within days."""
    tests = [
        group
        for alert in alerts()
        if alert.name == "GoodputBurn"
        for group in groups_of(alert.name, alert.severity, BURNS[alert.window], f',window="{alert.window}"', "1m")
    ]
    assert promtool(tmp_path, tests, [FOLDER / "goodput.yml"]) == ""


@needs_promtool
def test_a_test_that_does_not_hold_is_noticed(tmp_path: Path) -> None:
    """An alert that should fire and does not makes promtool complain."""
    wrong = groups_of("GpuLost", "critical", Case([{f"opsd_gpu_up{{{GPU}}}": "1x50"}], []))
    assert "GpuLost" in promtool(tmp_path, wrong)


@needs_promtool
def test_a_message_names_node_gpu_job_cost_and_next_step(tmp_path: Path) -> None:
    """As Alertmanager gets it, for an alert about a GPU on which a job of three GPUs works."""
    info = 'opsd_gpu_job_info{{instance="{}",gpu="{}",job_id="4242",rank="{}"}}'
    series = {
        f"opsd_gpu_up{{{GPU}}}": "0x50",
        info.format("node-17:9477", 3, 0): "1x50",
        info.format("node-17:9477", 4, 1): "1x50",
        info.format("node-18:9477", 0, 2): "1x50",
    }
    message = {
        "summary": "GPU 3 of node-17:9477 is lost",
        "description": "The driver no longer reaches the GPU. Jobs on it hang or crash until the node is reset.",
        "node": "node-17",
        "gpu": "3",
        "job": "4242 ",
        "cost": "the 3 GPUs of job 4242 go at this pace or wait ",
        "next_step": "on node-17: opsd incidents; opsd runbook show gpu_lost",
        "runbook_url": "http://node-17:9477/runbooks/gpu_lost",
    }
    labels = {"instance": "node-17:9477", "gpu": "3", "severity": "critical"}
    group = {
        "interval": "15s",
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "alert_rule_test": [
            {
                "eval_time": "10m",
                "alertname": "GpuLost",
                "exp_alerts": [{"exp_labels": labels, "exp_annotations": message}],
            }
        ],
    }
    assert promtool(tmp_path, [group]) == ""
