"""The cluster board: which nodes are not watched, which GPUs are idle, and what currently costs the most."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from opsd.dashboards.kit import (
    TO_AGENT,
    TO_JOB,
    TO_NODE,
    TO_RUNBOOK,
    Column,
    Query,
    board,
    graph,
    heat_map,
    listing,
    number,
    row,
)

ALL = 'cluster=~"$cluster"'
THROTTLE = f"instance_gpu:opsd_gpu_throttle:ratio_rate1m{{{ALL}}}"
OF_JOBS = f"max by (cluster, instance, gpu) (opsd_gpu_job_info{{{ALL}}})"

TENSOR = f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{ALL}}} and on (cluster, instance, gpu) {OF_JOBS}"
ROOM = (
    f"(opsd_host_filesystem_available_bytes{{{ALL}}} / opsd_host_filesystem_size_bytes{{{ALL}}} "
    f"or opsd_storage_available_bytes{{{ALL}}} / opsd_storage_size_bytes{{{ALL}}}) "
    f"unless on (cluster, instance, mount) opsd_storage_read_only{{{ALL}}} == 1"
)

NOW = row(
    "Now",
    number(
        "Silent nodes",
        "Agents that Prometheus cannot scrape. Nothing is known about these nodes.",
        "none",
        Query(f'count(up{{job="opsd", {ALL}}} == 0) or vector(0)'),
        bad_above=1,
        width=3,
    ),
    number(
        "GPUs lost",
        "GPUs that no longer answer their driver.",
        "none",
        Query(f"count(opsd_gpu_up{{{ALL}}} == 0) or vector(0)"),
        bad_above=1,
        width=3,
    ),
    number(
        "GPUs",
        "GPUs that answer their driver.",
        "none",
        Query(f"sum(cluster:opsd_gpu_up:sum{{{ALL}}})"),
        width=3,
    ),
    number(
        "GPUs of jobs",
        "Share of the GPUs that a job has, whether it uses them or not.",
        "percentunit",
        Query(f"count({OF_JOBS}) / sum(cluster:opsd_gpu_up:sum{{{ALL}}}) or vector(0)"),
        width=3,
    ),
    number(
        "Open incidents",
        "Incidents that are not resolved, symptoms included.",
        "none",
        Query(f"sum(opsd_incidents{{{ALL}}})"),
        warn_above=1,
        bad_above=5,
        width=3,
    ),
    number(
        "Need a person",
        "Escalated incidents: opsd can do nothing more by itself.",
        "none",
        Query(f'sum(opsd_incidents{{{ALL}, state="escalated"}})'),
        bad_above=1,
        width=3,
    ),
    number(
        "GPUs throttled",
        "GPUs throttled by heat, power brake or hardware slowdown for more than 10 % of the last minute.",
        "none",
        Query(f"count({THROTTLE} > 0.1) or vector(0)"),
        bad_above=1,
        width=3,
    ),
    number(
        "Blind collectors",
        "Collectors that fail or hang. What they watch is unknown.",
        "none",
        Query(f'count(opsd_collector_state{{{ALL}, state=~"error|hung"}} == 1) or vector(0)'),
        warn_above=1,
        bad_above=10,
        width=3,
    ),
)

NODE_LINKS = {"board of the node": TO_NODE, "page of the node": f"{TO_AGENT}/"}
BY_NODE = "by (cluster, instance)"
BY_JOB = "by (cluster, job_id, run)"
JOBS = f"opsd_gpu_job_info{{{ALL}}}"
ANSWERS = {0: ("no answer", "red"), 1: ("answers", "green")}
READY = {0: ("not ready", "orange"), 1: ("ready", "green")}
LEMONS = {0: ("chance", "green"), 1: ("lemon", "orange")}
COUNTED = {0: ("left out", "orange"), 1: ("counted", "green")}
SUSPECTS = f"max {BY_NODE} (opsd_node_lemon_confidence_ratio{{{ALL}}})"
REMEDIES = f"max {BY_NODE} (opsd_repair_attempts{{{ALL}}})"
IN_REPAIR = (
    f'(max by (cluster, instance, state) (opsd_repair_state{{{ALL}, state!="returned"}}) == 1 '
    f'unless on (cluster, instance) (max {BY_NODE} (opsd_slurm_node_flag{{{ALL}, flag="drain"}}) == 0 '
    f"unless on (cluster, instance) opsd_repair_age_seconds{{{ALL}}}))"
)
"""As `opsd status` has it: what has ended is left out once Slurm has the node back."""
GUIDES = {"runbook": TO_RUNBOOK, "runbook on the node": f"{TO_AGENT}/runbooks/${{__data.fields.kind}}"}

LISTS = row(
    "What and where",
    listing(
        "Nodes",
        "Every agent that Prometheus knows. One that does not answer: the node, its network or the agent is down.",
        Column("agent", f'max {BY_NODE} (up{{job="opsd", {ALL}}})', words=ANSWERS),
        Column("GPUs", f"sum {BY_NODE} (opsd_gpu_up{{{ALL}}})"),
        Column("lost", f"count {BY_NODE} (opsd_gpu_up{{{ALL}}} == 0)"),
        Column("of jobs", f"count {BY_NODE} ({OF_JOBS})"),
        Column("incidents", f"sum {BY_NODE} (opsd_incidents{{{ALL}}})"),
        links={"instance": NODE_LINKS},
    ),
    listing(
        "Incidents",
        "Open ones by node and kind, symptoms included. A kind leads to its runbook.",
        Column("open", f"sum by (cluster, instance, kind, severity, state) (opsd_incidents{{{ALL}}}) > 0"),
        links={"instance": NODE_LINKS, "kind": GUIDES},
        empty="none",
    ),
    listing(
        "Jobs",
        "Jobs that have GPUs, with the run where ranks have pages.",
        Column("GPUs", f"count {BY_JOB} ({JOBS})"),
        Column("nodes", f"count {BY_JOB} (max by (cluster, job_id, run, instance) ({JOBS}))"),
        links={"job_id": {"board of the job": TO_JOB}, "run": {"board of the job": TO_JOB}},
        empty="none",
    ),
    listing(
        "Spares",
        "Nodes that wait to take another's place.",
        Column("state", f"max {BY_NODE} (opsd_spare_ready{{{ALL}}})", words=READY),
        Column("verified ago", f"max {BY_NODE} (opsd_spare_verified_age_seconds{{{ALL}}})", "s"),
        links={"instance": NODE_LINKS},
        empty="none",
    ),
    listing(
        "Repairs",
        "Nodes whose repair is ordered, under way, or has left them out of service: rma waits for its replacement.",
        Column("remedies", f"{IN_REPAIR} * on (cluster, instance) group_left () {REMEDIES}"),
        links={"instance": NODE_LINKS},
        empty="none",
    ),
    listing(
        "Failing again and again",
        "Nodes with two or more faults in 30 days, failed jobs among them where Slurm's accounting could be read. "
        "Lemons, by the cluster's own history, are to be replaced.",
        Column("score", f"max {BY_NODE} (opsd_node_score{{{ALL}}}) and {SUSPECTS}"),
        Column("faults", f"max {BY_NODE} (opsd_node_faults{{{ALL}}}) and {SUSPECTS}"),
        Column("not by chance", SUSPECTS, "percentunit"),
        Column("verdict", f"max {BY_NODE} (opsd_node_lemon{{{ALL}}}) and {SUSPECTS}", words=LEMONS),
        Column("failed jobs", f"max {BY_NODE} (opsd_node_failed_jobs_counted{{{ALL}}}) and {SUSPECTS}", words=COUNTED),
        links={"instance": NODE_LINKS},
        empty="none",
    ),
)

RUNS = row(
    "Runs",
    graph(
        "Goodput",
        "New steps of the last 30 minutes times the usual step time, divided by 30 minutes.",
        "percentunit",
        Query(f"run:opsd_goodput:ratio_rate30m{{{ALL}}}", "{{run}}"),
        top=1,
        empty="no run of half an hour",
    ),
    graph(
        "Tokens/s against usual",
        "Throughput divided by its median of the last six hours.",
        "percentunit",
        Query(f"run:opsd_rank_tokens:rate5m{{{ALL}}} / run:opsd_rank_tokens:usual6h{{{ALL}}}", "{{run}}"),
        top=1,
        bad_at=0.8,
        empty="no run that tells its tokens",
    ),
)

GPUS = row(
    "GPUs",
    graph(
        "Tensor cores active",
        "Lowest, median and highest share of time in which tensor cores were active, over GPUs "
        "of jobs. GPU utilization says little: it can be 100 % at a fifth of a GPU's throughput.",
        "percentunit",
        *(Query(f"quantile({q}, {TENSOR})", n) for q, n in ((0, "lowest"), (0.5, "median"), (1, "highest"))),
        top=1,
        empty="no GPU of a job",
    ),
    heat_map(
        "Temperatures",
        "GPUs by temperature. One hot GPU: its own cooling. All of them: the room.",
        "celsius",
        Query(f"DCGM_FI_DEV_GPU_TEMP{{{ALL}}}"),
    ),
    graph(
        "Throttled the most",
        "The ten GPUs that are throttled for the largest share of time.",
        "percentunit",
        Query(f"topk(10, {THROTTLE})", "{{instance}} GPU {{gpu}}"),
        warn_at=0.02,
        bad_at=0.1,
    ),
    graph(
        "Power",
        "Power draw of all GPUs.",
        "watt",
        Query(f"sum by (cluster) (DCGM_FI_DEV_POWER_USAGE{{{ALL}}})", "{{cluster}}"),
    ),
)

NETWORK_AND_STORAGE = row(
    "Network and storage",
    graph(
        "Ports with errors",
        "The ten ports with the most errors of any kind.",
        "cps",
        Query(
            f"topk(10, sum by (instance, device, port) (rate(opsd_ib_errors_total{{{ALL}}}[$__rate_interval])))",
            "{{instance}} {{device}}/{{port}}",
        ),
        width=8,
        empty="no port",
    ),
    graph(
        "Network",
        "Data sent by all nodes.",
        "Bps",
        Query(f"sum(rate(opsd_ib_transmitted_bytes_total{{{ALL}}}[$__rate_interval]))", "sent"),
        width=8,
    ),
    graph(
        "File systems nearly full",
        "The ten with the smallest share of free space.",
        "percentunit",
        Query(
            f"bottomk(10, {ROOM})",
            "{{instance}} {{mount}}",
        ),
        width=8,
        top=1,
        bad_at=0.05,
    ),
    collapsed=True,
)

AGENTS = row(
    "opsd",
    graph(
        "Releases",
        "Agents by release. Two releases for a long time: an upgrade that stopped half-way.",
        "none",
        Query(f"count by (version) (opsd_build_info{{{ALL}}})", "{{version}}"),
    ),
    graph(
        "Slowest agents",
        "The ten agents with the longest ticks.",
        "s",
        Query(f"topk(10, opsd_agent_tick_seconds{{{ALL}}})", "{{instance}}"),
    ),
    collapsed=True,
)


def build() -> dashboard.Dashboard:
    """Rows of current values and lists, then of runs, GPUs, network, storage and opsd."""
    return board(
        "opsd-cluster",
        "opsd / cluster",
        "All GPU nodes of a cluster.",
        [],
        within=ALL,
        rows=(NOW, LISTS, RUNS, GPUS, NETWORK_AND_STORAGE, AGENTS),
    )
