"""The cluster board: is all of it watched, is all of it at work, and what costs the most right now."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from opsd.dashboards.kit import Query, add_row, board, graph, heat_map, number

ALL = 'cluster=~"$cluster"'
THROTTLE = f"instance_gpu:opsd_gpu_throttle:ratio_rate1m{{{ALL}}}"
WORKING = f"max by (cluster, instance, gpu) (opsd_gpu_job_info{{{ALL}}})"

TENSOR = f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{ALL}}} and on (cluster, instance, gpu) {WORKING}"
ROOM = (
    f"(opsd_host_filesystem_available_bytes{{{ALL}}} / opsd_host_filesystem_size_bytes{{{ALL}}} "
    f"or opsd_storage_available_bytes{{{ALL}}} / opsd_storage_size_bytes{{{ALL}}}) "
    f"unless on (cluster, instance, mount) opsd_storage_read_only{{{ALL}}} == 1"
)


def build() -> dashboard.Dashboard:
    """Rows: now, runs, GPUs, network and storage, opsd."""
    result = board("opsd-cluster", "opsd / cluster", "All GPU nodes of a cluster.", [], within=ALL)
    for row in (_now, _runs, _gpus, _network_and_storage, _agents):
        result = row(result)
    return result


def _now(result: dashboard.Dashboard) -> dashboard.Dashboard:
    return add_row(
        result,
        "Now",
        number(
            "Nodes that do not answer",
            "Agents that Prometheus cannot scrape; nothing is known of these nodes.",
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
            "GPUs with a rank",
            "Share of the GPUs on which a rank of a run works.",
            "percentunit",
            Query(f"count({WORKING}) / sum(cluster:opsd_gpu_up:sum{{{ALL}}}) or vector(0)"),
            width=3,
        ),
        number(
            "Open incidents",
            "Incidents that are not over, symptoms included.",
            "none",
            Query(f"sum(opsd_incidents{{{ALL}}})"),
            warn_above=1,
            bad_above=5,
            width=3,
        ),
        number(
            "Waiting for a person",
            "Escalated incidents: opsd has done what it may.",
            "none",
            Query(f'sum(opsd_incidents{{{ALL}, state="escalated"}})'),
            bad_above=1,
            width=3,
        ),
        number(
            "GPUs throttled",
            "GPUs that heat, power brake or hardware hold back a tenth of the time.",
            "none",
            Query(f"count({THROTTLE} > 0.1) or vector(0)"),
            bad_above=1,
            width=3,
        ),
        number(
            "Blind collectors",
            "Collectors that raise or hang; what they watch is unknown.",
            "none",
            Query(f'count(opsd_collector_state{{{ALL}, state=~"error|hung"}} == 1) or vector(0)'),
            warn_above=1,
            bad_above=10,
            width=3,
        ),
    )


def _runs(result: dashboard.Dashboard) -> dashboard.Dashboard:
    return add_row(
        result,
        "Runs",
        graph(
            "Goodput",
            "Usual time of the new steps of half an hour, divided by half an hour.",
            "percentunit",
            Query(f"run:opsd_goodput:ratio_rate30m{{{ALL}}}", "{{run}}"),
        ),
        graph(
            "Tokens/s against usual",
            "Throughput divided by its median of the last six hours.",
            "percentunit",
            Query(f"run:opsd_rank_tokens:rate5m{{{ALL}}} / run:opsd_rank_tokens:usual6h{{{ALL}}}", "{{run}}"),
        ),
    )


def _gpus(result: dashboard.Dashboard) -> dashboard.Dashboard:
    return add_row(
        result,
        "GPUs",
        graph(
            "Tensor cores active",
            "Lowest, median and highest share of time in which tensor cores worked, over GPUs "
            "with a rank. Utilization says little: it can be 100 % at a fifth of what a GPU can do.",
            "percentunit",
            *(Query(f"quantile({q}, {TENSOR})", n) for q, n in ((0, "lowest"), (0.5, "median"), (1, "highest"))),
        ),
        heat_map(
            "Temperatures",
            "GPUs by temperature. One above the crowd is its own cooling, all of them the room.",
            "celsius",
            Query(f"DCGM_FI_DEV_GPU_TEMP{{{ALL}}}"),
        ),
        graph(
            "Throttled the most",
            "The ten GPUs that are held back for the largest share of time.",
            "percentunit",
            Query(f"topk(10, {THROTTLE})", "{{instance}} GPU {{gpu}}"),
        ),
        graph(
            "Power",
            "What all GPUs draw.",
            "watt",
            Query(f"sum by (cluster) (DCGM_FI_DEV_POWER_USAGE{{{ALL}}})", "{{cluster}}"),
        ),
    )


def _network_and_storage(result: dashboard.Dashboard) -> dashboard.Dashboard:
    return add_row(
        result,
        "Network and storage",
        graph(
            "Ports with errors",
            "The ten ports that count the most errors, of any kind.",
            "cps",
            Query(
                f"topk(10, sum by (instance, device, port) (rate(opsd_ib_errors_total{{{ALL}}}[$__rate_interval])))",
                "{{instance}} {{device}}/{{port}}",
            ),
            width=8,
        ),
        graph(
            "Network",
            "Data that leaves all nodes.",
            "Bps",
            Query(f"sum(rate(opsd_ib_transmitted_bytes_total{{{ALL}}}[$__rate_interval]))", "sent"),
            width=8,
        ),
        graph(
            "File systems nearly full",
            "The ten with the least room.",
            "percentunit",
            Query(
                f"bottomk(10, {ROOM})",
                "{{instance}} {{mount}}",
            ),
            width=8,
        ),
        collapsed=True,
    )


def _agents(result: dashboard.Dashboard) -> dashboard.Dashboard:
    return add_row(
        result,
        "opsd",
        graph(
            "Releases",
            "Agents by release; two for long is an upgrade that stopped half-way.",
            "none",
            Query(f"count by (version) (opsd_build_info{{{ALL}}})", "{{version}}"),
        ),
        graph(
            "Slowest agents",
            "The ten agents whose ticks take longest.",
            "s",
            Query(f"topk(10, opsd_agent_tick_seconds{{{ALL}}})", "{{instance}}"),
        ),
        collapsed=True,
    )
