"""What the command line lists, and that every series is judged, shown or explained."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from opsd import dashboards, exitcodes, runbooks
from opsd.agent import metrics as own
from opsd.agent.collectors import build
from opsd.collectors import plugins
from opsd.commands.main import cli
from opsd.commands.metrics import catalogue, label_values
from opsd.config import Settings
from opsd.dashboards.alerts import FOLDER
from opsd.runbooks import RUNBOOKS
from opsd.runbooks.lib.guides import guides

# What the command line lists: metrics and runbooks, complete and consistent.


DOCS = Path(__file__).parents[2] / "docs"

_BASE_UNITS = {
    "",
    "seconds",
    "bytes",
    "celsius",
    "watts",
    "ratio",
    "hertz",
    "bytes_per_second",
    "joules",
    "volts",
    "amperes",
    "meters",
}

DCGM_EXPORTER_DEFAULTS = {
    "DCGM_FI_DEV_SM_CLOCK": "gauge",
    "DCGM_FI_DEV_MEM_CLOCK": "gauge",
    "DCGM_FI_DEV_MEMORY_TEMP": "gauge",
    "DCGM_FI_DEV_GPU_TEMP": "gauge",
    "DCGM_FI_DEV_POWER_USAGE": "gauge",
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "counter",
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": "counter",
    "DCGM_FI_DEV_GPU_UTIL": "gauge",
    "DCGM_FI_DEV_MEM_COPY_UTIL": "gauge",
    "DCGM_FI_DEV_ENC_UTIL": "gauge",
    "DCGM_FI_DEV_DEC_UTIL": "gauge",
    "DCGM_FI_DEV_XID_ERRORS": "gauge",
    "DCGM_FI_DEV_FB_FREE": "gauge",
    "DCGM_FI_DEV_FB_USED": "gauge",
    "DCGM_FI_DEV_FB_RESERVED": "gauge",
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": "counter",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": "counter",
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": "counter",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "gauge",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "gauge",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "gauge",
    "DCGM_FI_PROF_DRAM_ACTIVE": "gauge",
    "DCGM_FI_PROF_PCIE_TX_BYTES": "gauge",
    "DCGM_FI_PROF_PCIE_RX_BYTES": "gauge",
}
"""What of default-counters.csv in NVIDIA/dcgm-exporter 4.4 a bare-metal GPU's NVML can tell."""


@pytest.mark.parametrize("metric", [metric for _, metric in catalogue()], ids=lambda metric: metric.name)
def test_a_metric_follows_the_naming_rules(metric) -> None:
    """Help, base unit at the end of the name, _total for counters and _info for infos, valid labels."""
    assert metric.help.endswith(".")
    assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", metric.name)
    assert len(set(metric.labels)) == len(metric.labels)
    assert all(re.fullmatch(r"[a-zA-Z][a-zA-Z0-9_]*", label) for label in metric.labels)
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert (metric.kind == "info") == metric.name.endswith("_info")
    assert metric.unit in _BASE_UNITS
    if metric.unit and metric.name.startswith("opsd_"):
        assert metric.name.removesuffix("_total").endswith("_" + metric.unit)


def test_dcgm_exporters_defaults_are_all_there() -> None:
    """Dashboards and alerts written for dcgm-exporter find its names, its labels and a type that fits."""
    ours = {metric.name: metric for _, metric in catalogue()}
    for name, kind in DCGM_EXPORTER_DEFAULTS.items():
        assert ours[name].kind == {"gauge": "gauge", "counter": "untyped"}[kind], name
        assert ours[name].labels == ("gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname", "hostname"), name


def test_no_name_is_used_twice() -> None:
    """Each metric has one source."""
    names = [metric.name for _, metric in catalogue()]
    assert sorted(set(names)) == sorted(names)


def test_the_list_of_metrics_has_every_column() -> None:
    """For people one line each, for scripts JSON with the same content."""
    rows = json.loads(CliRunner().invoke(cli, ["metrics", "--json"]).output)
    assert {row["name"] for row in rows} == {metric.name for _, metric in catalogue()}
    assert all(set(row) == {"name", "type", "labels", "unit", "help", "source"} for row in rows)
    listed = CliRunner().invoke(cli, ["metrics", "--list"]).output
    assert all(
        any(line.startswith(row["name"]) and row["help"] in line for line in listed.splitlines()) for row in rows
    )


def test_the_values_of_every_label_are_documented() -> None:
    """What bounds the number of series, and nothing about labels that are gone."""
    sources = [(own.METRICS, own.LABELS)]
    sources += [(made.metrics, plugin.labels) for made, plugin in zip(build(Settings()), plugins(), strict=True)]
    for metrics, labels in sources:
        assert set(labels) == {label for metric in metrics for label in metric.labels}
    listed = CliRunner().invoke(cli, ["metrics", "--list"]).output
    assert all(f"{label} " in listed and values in listed for label, values in label_values().items())


@pytest.mark.parametrize("book", RUNBOOKS, ids=lambda book: book.kind)
def test_a_runbook_can_be_read(book) -> None:
    """The list names it, and its page says the same as its file."""
    assert book.kind in CliRunner().invoke(cli, ["runbook", "list"]).output
    shown = CliRunner().invoke(cli, ["runbook", "show", book.kind, "--markdown"])
    assert shown.exit_code == exitcodes.OK
    assert shown.output == (DOCS / f"runbooks/{book.kind}.md").read_text(encoding="utf-8")
    assert guides()[book.kind].title in CliRunner().invoke(cli, ["runbook", "show", book.kind]).output


def test_a_runbook_that_does_not_exist_names_the_nearest() -> None:
    """A slip of the finger is one sentence."""
    assert "did you mean rank_crash?" in CliRunner().invoke(cli, ["runbook", "show", "rank_crahs"]).output


# Every series that a collector exports is judged by a runbook, shown on a board, or listed here with the reason.


UNJUDGED: Mapping[str, Collection[str]] = {
    "counts events that runbooks judge one by one, or problems that come as events, too": (
        "opsd_gpu_driver_reloads_total", "opsd_kernel_events_total", "opsd_nccl_log_messages_total",
        "opsd_nccl_problems", "opsd_sxid_total",
    ),
    "dcgm-exporter exports it: boards and alerts made for that go on working": (
        "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", "DCGM_FI_DEV_DEC_UTIL", "DCGM_FI_DEV_ENC_UTIL", "DCGM_FI_DEV_FB_FREE",
        "DCGM_FI_DEV_FB_RESERVED", "DCGM_FI_DEV_MEM_CLOCK", "DCGM_FI_DEV_MEM_COPY_UTIL",
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "DCGM_FI_PROF_NVLINK_RX_BYTES", "DCGM_FI_PROF_NVLINK_TX_BYTES",
        "DCGM_FI_PROF_PCIE_TX_BYTES", "DCGM_FI_PROF_PIPE_FP16_ACTIVE", "DCGM_FI_PROF_PIPE_FP32_ACTIVE",
        "DCGM_FI_PROF_PIPE_FP64_ACTIVE", "DCGM_FI_PROF_SM_OCCUPANCY",
    ),
    "says what something is or how much of it there is; no value of it is a fault": (
        "opsd_gpu_clock_max_hertz", "opsd_gpu_fabric_info", "opsd_gpu_info", "opsd_gpu_memory_total_bytes",
        "opsd_gpu_power_limit_max_watts", "opsd_gpu_profiling", "opsd_host_cpus", "opsd_host_numa_memory_total_bytes",
        "opsd_host_swap_total_bytes", "opsd_mig_info", "opsd_mig_job_info", "opsd_mig_memory_bytes",
        "opsd_nccl_communicators", "opsd_nccl_rank_logs",
    ),
    "counts use or work, whose amount is no fault; latencies and errors of the same thing are judged": (
        "opsd_evaluation_tokens", "opsd_gpu_nvlink_received_bytes_total", "opsd_gpu_performance_state",
        "opsd_gpu_process_memory_bytes", "opsd_host_numa_memory_free_bytes", "opsd_host_numa_missed_pages_total",
        "opsd_host_processes", "opsd_ib_received_bytes_total", "opsd_kmsg_records_total",
        "opsd_mig_memory_used_bytes", "opsd_mig_processes", "opsd_spare_staged_bytes", "opsd_storage_in_flight",
        "opsd_storage_io_seconds_total", "opsd_storage_io_total", "opsd_storage_major_faults_total",
        "opsd_storage_nfs_bytes_total", "opsd_storage_nfs_operations_total", "opsd_storage_nfs_retransmits_total",
        "opsd_storage_nfs_round_trip_seconds_total", "opsd_storage_nfs_seconds_total",
        "opsd_storage_nfs_timeouts_total", "opsd_storage_pages_reclaimed_total",
    ),
    "counts errors of one link; those of all links of the GPU are judged": ("opsd_gpu_nvlink_link_errors_total",),
    "is in the facts about ranks and repairs, which are judged": (
        "opsd_rank_phase", "opsd_rank_phase_age_seconds", "opsd_rank_router_dropped_ratio",
        "opsd_rank_router_entropy_ratio", "opsd_rank_router_load_limit_ratio", "opsd_rank_router_load_ratio",
        "opsd_repair_ended",
    ),
    "says whether a source answers; the collector's state, or an alert about what it says, judges that": (
        "opsd_dcgm_engine_up", "opsd_dcgm_exporter_up", "opsd_kmsg_position_kept", "opsd_nccl_blocked_users",
        "opsd_nccl_ras_answer_age_seconds", "opsd_prolog_age_seconds", "opsd_ranks_left_out",
        "opsd_slurm_answer_age_seconds",
        "opsd_storage_nvme_smart_readable",
    ),
    "the kernel gives out more than memory can hold": ("opsd_host_open_files", "opsd_host_open_files_max"),
    "the site chooses it; `opsd preflight` warns": ("opsd_gpu_persistence_mode",),
}  # fmt: skip
"""What neither a runbook nor an alert nor a board reads, by the reason why it is exported all the same."""

EXPLAINED = {name for names in UNJUDGED.values() for name in names}


def text_of(folder: Path, pattern: str) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob(pattern)))


def read_by(text: str) -> set[str]:
    return set(re.findall(r"\b(?:opsd|DCGM_FI)_\w+", text))


def exported() -> Iterator[str]:
    """The series of collectors; what the agent says of itself is on its pages."""
    return (metric.name for source, metric in catalogue() if source != "agent")


def unread() -> set[str]:
    judged = text_of(Path(runbooks.__file__).parent, "**/*.py")
    shown = text_of(Path(dashboards.__file__).parent, "*.json")
    alerted = text_of(FOLDER, "*.yml")
    return set(exported()) - read_by(judged) - read_by(shown) - read_by(alerted)


def test_every_series_is_judged_or_has_a_reason() -> None:
    """A series that nobody reads is given a judge, shown, dropped, or explained."""
    assert unread() - EXPLAINED == set()


def test_no_reason_is_out_of_date() -> None:
    """What is gone, or is read by now, needs no reason."""
    assert EXPLAINED - unread() == set()
