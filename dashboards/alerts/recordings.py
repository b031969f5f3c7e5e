"""Recorded series that boards and alerts share."""

from __future__ import annotations

from opsd.dashboards.alerts.model import Group, Record

RECORDINGS = Group(
    "recordings",
    (
        Record("run:opsd_rank_tokens:rate5m", "sum by (cluster, run) (rate(opsd_rank_tokens_total[5m]))"),
        Record("run:opsd_rank_tokens:usual6h", "quantile_over_time(0.5, run:opsd_rank_tokens:rate5m[6h])"),
        Record(
            "run_phase:opsd_rank_phase_seconds:ratio_rate5m",
            """
sum by (cluster, run, phase) (rate(opsd_rank_phase_seconds_total[5m]))
  / on (cluster, run) group_left ()
sum by (cluster, run) (rate(opsd_rank_phase_seconds_total[5m]))
""",
        ),
        Record("cluster:opsd_gpu_up:sum", "sum by (cluster) (opsd_gpu_up)"),
        Record("cluster:opsd_gpu_job_info:count", "count by (cluster) (opsd_gpu_job_info)"),
    ),
)
