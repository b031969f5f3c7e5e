"""Recorded series that boards and alerts share."""

from __future__ import annotations

from opsd.dashboards.alerts.model import Group, RecordingRule

RECORDINGS = Group(
    "recordings",
    (
        RecordingRule("run:opsd_rank_tokens:rate5m", "sum by (cluster, run) (rate(opsd_rank_tokens_total[5m]))"),
        RecordingRule("run:opsd_rank_tokens:usual6h", "quantile_over_time(0.5, run:opsd_rank_tokens:rate5m[6h])"),
        RecordingRule(
            "run_phase:opsd_rank_phase_seconds:ratio_rate5m",
            """
sum by (cluster, run, phase) (rate(opsd_rank_phase_seconds_total[5m]))
  / on (cluster, run) group_left ()
sum by (cluster, run) (rate(opsd_rank_phase_seconds_total[5m]))
""",
        ),
        RecordingRule("cluster:opsd_gpu_up:sum", "sum by (cluster) (opsd_gpu_up)"),
        RecordingRule("cluster:opsd_gpu_job_info:count", "count by (cluster) (opsd_gpu_job_info)"),
    ),
)
