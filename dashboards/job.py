"""The job board: everything about one run on one screen."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from opsd.dashboards.kit import (
    TO_AGENT,
    TO_NODE,
    TOKENS_PER_S,
    Column,
    Query,
    board,
    graph,
    heat_map,
    label_variable,
    listing,
    number,
    row,
    timeline,
)

ALL = 'cluster=~"$cluster"'
RUN = f'{ALL}, run=~"$run"'
ITS_GPUS = f'max by (cluster, instance, gpu) (opsd_gpu_job_info{{{ALL}, job_id=~"$job"}})'
ITS_NODES = f'max by (cluster, instance) (opsd_gpu_job_info{{{ALL}, job_id=~"$job"}})'

IDLE = f'opsd_host_cpu_ratio{{{ALL}, mode="idle"}}'
MEMORY = f"(opsd_host_memory_available_bytes{{{ALL}}} / opsd_host_memory_total_bytes{{{ALL}}})"
DISKS = f'rate(opsd_storage_io_bytes_total{{{ALL}, op=~"read|write"}}[$__rate_interval])'
NVLINK = f"rate(opsd_gpu_nvlink_transmitted_bytes_total{{{ALL}}}[$__rate_interval])"
INFINIBAND = f"rate(opsd_ib_transmitted_bytes_total{{{ALL}}}[$__rate_interval])"


def _on_gpus(expression: str) -> str:
    return f"{expression} and on (cluster, instance, gpu) {ITS_GPUS}"


def _over_gpus(metric: str) -> list[Query]:
    spread = ((0, "lowest"), (0.5, "median"), (1, "highest"))
    return [Query(f"quantile({q}, {_on_gpus(f'{metric}{{{ALL}}}')})", name) for q, name in spread]


def _on_nodes(expression: str) -> str:
    return f"{expression} and on (cluster, instance) {ITS_NODES}"


NOW = row(
    "Now",
    number(
        "Step",
        "Highest step that any rank has completed.",
        "none",
        Query(f"max(run:opsd_rank_step:max{{{RUN}}})"),
        width=3,
    ),
    number(
        "Last sign of life",
        "Seconds since any rank last changed phase or finished a step.",
        "s",
        Query(f"min(opsd_rank_last_change_age_seconds{{{RUN}}})"),
        warn_above=60,
        bad_above=300,
        width=3,
    ),
    number(
        "Tokens/s",
        "All ranks together, over five minutes.",
        TOKENS_PER_S,
        Query(f"sum(run:opsd_rank_tokens:rate5m{{{RUN}}})"),
        width=3,
    ),
    number(
        "Against usual",
        "Tokens/s divided by their median of the last six hours.",
        "percentunit",
        Query(f"min(run:opsd_rank_tokens:rate5m{{{RUN}}} / run:opsd_rank_tokens:usual6h{{{RUN}}})"),
        width=3,
    ),
    number(
        "Goodput",
        "New steps of the last hour times the usual step time, divided by one hour.",
        "percentunit",
        Query(f"min(run:opsd_goodput:ratio_rate1h{{{RUN}}})"),
        width=3,
        empty="after 1 h",
    ),
    number(
        "Tensor cores",
        "Median over the job's GPUs. The closest approximation of MFU without knowing the model.",
        "percentunit",
        Query(f"quantile(0.5, {_on_gpus(f'DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{ALL}}}')})"),
        width=3,
    ),
    number(
        "Ranks alive",
        "Share of the ranks whose process is alive.",
        "percentunit",
        Query(f"avg(opsd_rank_up{{{RUN}}})"),
        width=3,
    ),
    number(
        "Open incidents",
        "On the nodes of this job, symptoms included.",
        "none",
        Query(f"sum({_on_nodes(f'opsd_incidents{{{ALL}}}')})"),
        bad_above=1,
        width=3,
    ),
)

RANKS = row(
    "Ranks",
    heat_map(
        "Step times",
        "Ranks by the duration of their last step. A second band: one or more stragglers.",
        "s",
        Query(f"opsd_rank_step_seconds{{{RUN}}}"),
    ),
    graph(
        "Waiting least",
        "The ten ranks with the least time in collectives: the others wait for them.",
        "percentunit",
        Query(
            f'bottomk(10, rate(opsd_rank_phase_seconds_total{{{RUN}, phase="collective"}}[$__rate_interval]))',
            "rank {{rank}} on {{instance}}",
        ),
    ),
    graph(
        "Where the time goes",
        "Share of each phase in completed steps, over all ranks.",
        "percentunit",
        Query(f"run_phase:opsd_rank_phase_seconds:ratio_rate5m{{{RUN}}}", "{{phase}}"),
    ),
    graph(
        "Longest without a sign of life",
        "The ten ranks that have not changed phase or step for longest.",
        "s",
        Query(f"topk(10, opsd_rank_last_change_age_seconds{{{RUN}}})", "rank {{rank}} on {{instance}}"),
        warn_at=60,
        bad_at=300,
    ),
)

OF_JOB = f'opsd_gpu_job_info{{{ALL}, job_id=~"$job"}}'
NODES = row(
    "Nodes and events",
    listing(
        "Nodes of the job",
        "With their GPUs, and the open incidents of the node, of any job.",
        Column("GPUs", f"count by (cluster, instance) ({OF_JOB})"),
        Column(
            "incidents", f"sum by (cluster, instance) (opsd_incidents{{{ALL}}}) and on (cluster, instance) {OF_JOB}"
        ),
        Column("slowest step", f"max by (cluster, instance) (opsd_rank_step_seconds{{{RUN}}})", "s"),
        links={"instance": {"board of the node": TO_NODE, "page of the node": f"{TO_AGENT}/"}},
    ),
    timeline(
        "What happened when",
        "Restarts, and incidents on the nodes of this job. Green: none.",
        Query(f'max by (run) (opsd_run_state{{{RUN}, state="restarting"}})', "restarting"),
        Query(f"sum by (kind) ({_on_nodes(f'opsd_incidents{{{ALL}}}')}) > 0", "{{kind}}"),
        width=12,
        height=9,
        empty="no run of opsd launch",
    ),
)

PROGRESS = row(
    "Progress",
    graph(
        "Generation",
        "Each restart begins a new generation of ranks.",
        "none",
        Query(f"max by (run) (opsd_run_generation{{{RUN}}})", "{{run}}"),
        width=8,
    ),
    graph(
        "Steps behind their checkpoint",
        "Steps that would be lost if the run failed now.",
        "none",
        Query(f"max by (run) (opsd_rank_step{{{RUN}}}) - min by (run) (opsd_rank_committed_step{{{RUN}}})", "{{run}}"),
        width=8,
    ),
    graph(
        "Loss",
        "Mean over the ranks.",
        "none",
        Query(f"avg by (run) (opsd_rank_loss{{{RUN}}})", "{{run}}"),
        width=8,
        floor=None,
    ),
)

GPUS = row(
    "GPUs",
    graph(
        "Tensor cores active",
        "Share of time in which tensor cores were active.",
        "percentunit",
        *_over_gpus("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"),
        top=1,
    ),
    graph("Power", "Board power of the job's GPUs.", "watt", *_over_gpus("DCGM_FI_DEV_POWER_USAGE")),
    graph(
        "Temperature",
        "Of the job's GPUs.",
        "celsius",
        *_over_gpus("DCGM_FI_DEV_GPU_TEMP"),
        floor=None,
        warn_at=83,
        bad_at=87,
    ),
    graph(
        "Throttled",
        "Share of time in which heat, power brake or hardware slowdown throttled a GPU.",
        "percentunit",
        Query(
            f"topk(10, {_on_gpus(f'instance_gpu:opsd_gpu_throttle:ratio_rate1m{{{ALL}}}')})",
            "{{instance}} GPU {{gpu}}",
        ),
        warn_at=0.02,
        bad_at=0.1,
    ),
)

NETWORK = row(
    "Network",
    graph(
        "InfiniBand",
        "Data sent by each node of the job.",
        "Bps",
        Query(
            f"sum by (instance) ({_on_nodes(INFINIBAND)})",
            "{{instance}}",
        ),
        width=8,
    ),
    graph(
        "NVLink",
        "Data that the GPUs of each node send over NVLink.",
        "Bps",
        Query(
            f"sum by (instance) ({_on_gpus(NVLINK)})",
            "{{instance}}",
        ),
        width=8,
    ),
    graph(
        "NCCL",
        "Seconds without progress in a collective, as reported by NCCL RAS.",
        "s",
        Query(_on_nodes(f"opsd_nccl_stalled_seconds{{{ALL}}}"), "{{instance}}"),
        width=8,
        empty="no NCCL RAS",
    ),
)

HARDWARE = row(
    "Memory errors and hosts",
    graph(
        "ECC errors",
        "New errors of the job's GPUs.",
        "none",
        Query(
            _on_gpus(f"(increase(opsd_gpu_ecc_errors_total{{{ALL}}}[$__rate_interval]) > 0)"),
            "{{instance}} GPU {{gpu}} {{type}}",
        ),
        width=8,
        top=1,
        empty="no errors",
    ),
    graph(
        "Processors",
        "Share of CPU time in use, by node.",
        "percentunit",
        Query(f"1 - {_on_nodes(IDLE)}", "{{instance}}"),
        width=8,
        top=1,
    ),
    graph(
        "Memory left",
        "Share of each node's memory that is available.",
        "percentunit",
        Query(_on_nodes(MEMORY), "{{instance}}"),
        width=8,
        top=1,
        bad_at=0.03,
    ),
    collapsed=True,
)

STORAGE = row(
    "Storage",
    graph(
        "Disks",
        "Data read and written, by node.",
        "Bps",
        Query(
            f"sum by (instance, op) ({_on_nodes(DISKS)})",
            "{{instance}} {{op}}",
        ),
        empty="no disk is shown by the kernel",
    ),
    graph(
        "Network file systems",
        "Response time of a statfs call, by file system.",
        "s",
        Query(_on_nodes(f"opsd_storage_response_seconds{{{ALL}}}"), "{{instance}} {{mount}}"),
        empty="no network file system",
    ),
    collapsed=True,
)


def build() -> dashboard.Dashboard:
    """Rows: now, nodes and events, progress, ranks, GPUs, network; collapsed: memory errors and hosts, storage."""
    variables = [
        label_variable("job", "Job", "opsd_gpu_job_info", of="job_id", within=ALL, all_of_them=False),
        label_variable("run", "Run", "opsd_gpu_job_info", within=f'{ALL}, job_id=~"$job"'),
    ]
    return board(
        "opsd-job",
        "opsd / job",
        "One job on all its nodes.",
        variables,
        within=ALL,
        rows=(NOW, NODES, PROGRESS, RANKS, GPUS, NETWORK, HARDWARE, STORAGE),
    )
