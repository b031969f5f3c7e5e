"""The node board: the GPUs of one node, what slows them down, the ranks on them, and opsd itself."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from opsd.dashboards.kit import TOKENS_PER_S, Query, board, graph, label_variable, number, row

NODE = 'cluster=~"$cluster", instance=~"$node"'
GPU = f'{NODE}, gpu=~"$gpu"'
OF_GPU = "max by (gpu)"
"""Without it the lines of a graph are in the order of the GPUs' UUIDs, and so are their colours."""

NOW = row(
    "Now",
    number(
        "Open incidents", "Incidents that are not resolved; escalated ones wait for a person.", "none",
        Query(f'sum(opsd_incidents{{{NODE}, state!="resolved"}})'), bad_above=1,
    ),
    number(
        "GPUs lost", "GPUs that no longer answer their driver.", "none",
        Query(f"count(opsd_gpu_up{{{NODE}}} == 0) or vector(0)"), bad_above=1,
    ),
    number(
        "Worst throttle", "Largest share of the last minute in which heat, power brake or hardware slowdown "
        "throttled a GPU. The power cap is not counted: near 700 W it is normal.", "percentunit",
        Query(
            f'max(rate(opsd_gpu_throttle_seconds_total{{{NODE}, reason=~"sw_thermal|hw_thermal|hw_slowdown|'
            'hw_power_brake"}[1m]))'
        ), warn_above=0.02, bad_above=0.1,
    ),
    number(
        "Tokens/s on this node", "Sum over the ranks of this node.", TOKENS_PER_S,
        Query(f"sum(opsd_rank_tokens_per_second{{{NODE}}})"),
    ),
    number(
        "Blind collectors", "Collectors that fail, hang or have not delivered. What they watch is unknown.",
        "none", Query(f'count(opsd_collector_state{{{NODE}, state=~"error|hung"}} == 1) or vector(0)'),
        bad_above=1,
    ),
    number(
        "Hottest GPU", "Highest GPU temperature.", "celsius",
        Query(f"max(DCGM_FI_DEV_GPU_TEMP{{{GPU}}})"), warn_above=80, bad_above=86,
    ),
)  # fmt: skip

GPUS = row(
    "GPUs",
    graph(
        "Throttled", "Share of time in which each reason lowered the clocks. Near 700 W the power cap is normal.",
        "percentunit",
        Query(
            f"rate(opsd_gpu_throttle_seconds_total{{{GPU}}}[$__rate_interval]) > 0", "GPU {{gpu}} {{reason}}"
        ), warn_at=0.02, bad_at=0.1, empty="not throttled",
    ),
    graph(
        "Utilization", "Share of time with at least one kernel running. It can be 100 % at a fifth of a GPU's "
        "throughput: see the next two.", "percent",
        Query(f"{OF_GPU} (DCGM_FI_DEV_GPU_UTIL{{{GPU}}})", "GPU {{gpu}}"), top=100,
    ),
    graph(
        "Tensor cores active", "Share of time in which tensor cores were busy: the nearest to MFU without the model.",
        "percentunit", Query(f"{OF_GPU} (DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{GPU}}})", "GPU {{gpu}}"), top=1,
    ),
    graph(
        "SMs active", "Share of SMs with at least one warp, and share of time with any work on the GPU.",
        "percentunit", Query(f"{OF_GPU} (DCGM_FI_PROF_SM_ACTIVE{{{GPU}}})", "GPU {{gpu}}"),
        Query(f"avg(DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{GPU}}})", "any work, mean"), top=1,
    ),
    graph(
        "Memory bandwidth", "Share of the device memory's bandwidth in use.", "percentunit",
        Query(f"{OF_GPU} (DCGM_FI_PROF_DRAM_ACTIVE{{{GPU}}})", "GPU {{gpu}}"), top=1,
    ),
    graph(
        "SM clock", "A GPU below its neighbours at equal load slows down the whole job.", "suffix:MHz",
        Query(f"{OF_GPU} (DCGM_FI_DEV_SM_CLOCK{{{GPU}}})", "GPU {{gpu}}"),
    ),
    graph(
        "Temperature", "GPU temperature, and where the driver slows the first GPU down.", "celsius",
        Query(f"{OF_GPU} (DCGM_FI_DEV_GPU_TEMP{{{GPU}}})", "GPU {{gpu}}"),
        Query(f'min(opsd_gpu_temperature_threshold_celsius{{{GPU}, threshold="slowdown"}})', "slows down"),
        floor=None, warn_at=83, bad_at=87,
    ),
    graph(
        "Power", "Board power, and the current power limit.", "watt",
        Query(f"{OF_GPU} (DCGM_FI_DEV_POWER_USAGE{{{GPU}}})", "GPU {{gpu}}"),
        Query(f"min(opsd_gpu_power_limit_watts{{{GPU}}})", "lowest limit"),
    ),
    graph(
        "Power of all GPUs", "Board power of the selected GPUs together.", "watt",
        Query(f"sum(DCGM_FI_DEV_POWER_USAGE{{{GPU}}})", "all GPUs"),
    ),
    graph(
        "NVLink traffic", "Data sent and received over all links of a GPU.", "binBps",
        Query(f"{OF_GPU} (1024 * rate(DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL{{{GPU}}}[$__rate_interval]))", "GPU {{gpu}}"),
    ),
    graph(
        "Memory used", "Framebuffer memory in use.", "mbytes",
        Query(f"{OF_GPU} (DCGM_FI_DEV_FB_USED{{{GPU}}})", "GPU {{gpu}}"),
    ),
    graph(
        "PCIe traffic", "Data received over PCIe, protocol included.", "Bps",
        Query(f"{OF_GPU} (DCGM_FI_PROF_PCIE_RX_BYTES{{{GPU}}})", "GPU {{gpu}}"),
    ),
)  # fmt: skip

ERRORS = row(
    "GPU errors",
    graph(
        "ECC errors", "New errors since the driver was loaded, by type.", "none",
        Query(
            f'increase(opsd_gpu_ecc_errors_total{{{GPU}, counter="volatile"}}[$__rate_interval]) > 0',
            "GPU {{gpu}} {{type}}",
        ), width=8, top=1, empty="no errors",
    ),
    graph(
        "NVLink errors", "New errors on all links of a GPU.", "none",
        Query(f"increase(opsd_gpu_nvlink_errors_total{{{GPU}}}[$__rate_interval]) > 0", "GPU {{gpu}} {{type}}"),
        width=8, top=1, empty="no errors",
    ),
    graph(
        "PCIe replays", "Packets sent again. A rising rate: the link is failing.", "none",
        Query(f"increase(DCGM_FI_DEV_PCIE_REPLAY_COUNTER{{{GPU}}}[$__rate_interval]) > 0", "GPU {{gpu}}"),
        width=8, top=1, empty="no replays",
    ),
)  # fmt: skip

HOST = row(
    "Host",
    graph(
        "Memory", "What can be had without swapping, and what is swapped out.", "bytes",
        Query(f"opsd_host_memory_available_bytes{{{NODE}}}", "available"),
        Query(f"opsd_host_swap_used_bytes{{{NODE}}}", "swapped out"), width=8,
    ),
    graph(
        "Tasks", "Tasks that run or wait for a processor or a disk, and those of them that wait for a disk.", "none",
        Query(f'opsd_host_load_average{{{NODE}, minutes="1"}}', "load, 1 minute"),
        Query(f"opsd_host_tasks_blocked{{{NODE}}}", "blocked"), width=8, top=1,
    ),
    graph(
        "Heat", "Thermal zones of the host, and the composite temperature of its NVMe drives.", "celsius",
        Query(f"opsd_thermal_zone_celsius{{{NODE}}}", "{{zone}} {{type}}"),
        Query(f'opsd_storage_nvme_temperature_celsius{{{NODE}, sensor="composite"}}', "{{controller}}"), width=8,
        empty="no sensors",
    ),
    graph(
        "Network held up", "Ticks a second in which a port had data and no credit to send it; their length is the "
        "adapter's. And congestion notifications a second.", "none",
        Query(f"rate(opsd_ib_transmit_wait_ticks_total{{{NODE}}}[$__rate_interval]) > 0", "{{device}} waits"),
        Query(f"rate(opsd_ib_congestion_events_total{{{NODE}}}[$__rate_interval]) > 0", "{{device}} {{event}}"),
        width=8, top=1, empty="not held up",
    ),
    graph(
        "Clock", "How far the clock may be off, by the kernel; missing while no time service keeps it.", "s",
        Query(f"opsd_host_clock_max_error_seconds{{{NODE}}}", "at most"),
        Query(f"abs(opsd_host_clock_offset_seconds{{{NODE}}})", "known offset"), width=8, empty="not synchronised",
    ),
    graph(
        "Disks busy", "Share of time in which each disk had something to do.", "percentunit",
        Query(f"rate(opsd_storage_busy_seconds_total{{{NODE}}}[$__rate_interval])", "{{device}}"), width=8,
    ),
)  # fmt: skip

TRAINING = row(
    "Training",
    graph(
        "Step time", "Duration of the last step of every rank on this node.", "s",
        Query(f"opsd_rank_step_seconds{{{NODE}}}", "{{run}} rank {{rank}}"),
    ),
    graph(
        "Phases", "Where the ranks of this node spend their time.", "percentunit",
        Query(
            f"sum by (phase) (rate(opsd_rank_phase_seconds_total{{{NODE}}}[$__rate_interval])) / scalar("
            f"sum(rate(opsd_rank_phase_seconds_total{{{NODE}}}[$__rate_interval])))", "{{phase}}",
        ),
    ),
    graph(
        "Since the last sign of life", "Seconds since a rank last changed phase or finished a step.", "s",
        Query(f"opsd_rank_last_change_age_seconds{{{NODE}}}", "{{run}} rank {{rank}}"), warn_at=60, bad_at=300,
    ),
    graph(
        "Loss", "Loss of the last step.", "none", Query(f"opsd_rank_loss{{{NODE}}}", "{{run}} rank {{rank}}"),
        floor=None,
    ),
)  # fmt: skip

AGENT = row(
    "opsd",
    graph(
        "Collection time", "How long each collector takes; each has its own deadline.", "s",
        Query(f"opsd_collector_duration_seconds{{{NODE}}}", "{{collector}}"), width=8,
    ),
    graph(
        "Incidents opened", "Incidents that the agent opened, by kind.", "none",
        Query(f"increase(opsd_incidents_opened_total{{{NODE}}}[$__rate_interval]) > 0", "{{kind}}"), width=8,
        top=1, empty="none opened",
    ),
    graph(
        "Actions", "What the agent did, by verb and outcome.", "none",
        Query(f"increase(opsd_actions_total{{{NODE}}}[$__rate_interval]) > 0", "{{verb}} {{outcome}}"),
        width=8, top=1, empty="none",
    ),
)  # fmt: skip


def build() -> dashboard.Dashboard:
    """Rows: now, GPUs, errors, training, host and agent."""
    variables = [
        label_variable(
            "node", "Node", "opsd_build_info", of="instance", within='cluster=~"$cluster"', all_of_them=False
        ),
        label_variable("gpu", "GPU", "opsd_gpu_up", within=NODE),
    ]
    return board(
        "opsd-node",
        "opsd / node",
        "One GPU node and what runs on it, from its opsd agent.",
        variables,
        within=NODE,
        rows=(NOW, GPUS, ERRORS, HOST, TRAINING, AGENT),
    )
