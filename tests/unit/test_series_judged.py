"""Every series that a collector exports is judged by a runbook, shown on a board, or listed here with the reason."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from opsd import dashboards, runbooks
from opsd.commands.metrics import catalogue
from opsd.dashboards.alerts import FOLDER

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
    shown = text_of(Path(dashboards.__file__).parent, "*.py")
    alerted = text_of(FOLDER, "*.yml")
    return set(exported()) - read_by(judged) - read_by(shown) - read_by(alerted)


def test_every_series_is_judged_or_has_a_reason() -> None:
    """A series that nobody reads is given a judge, shown, dropped, or explained."""
    assert unread() - EXPLAINED == set()


def test_no_reason_is_out_of_date() -> None:
    """What is gone, or is read by now, needs no reason."""
    assert EXPLAINED - unread() == set()
