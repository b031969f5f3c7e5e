"""Recorded series that boards and alerts share."""

from __future__ import annotations

from dashboards.alerts.model import Group, Record

THROTTLES = "sw_thermal|hw_thermal|hw_slowdown|hw_power_brake"
"""Reasons that are throttles; near 700 W the software power cap is the normal state."""

RECORDINGS = Group(
    "recordings",
    (
        Record(
            "instance_gpu:opsd_gpu_throttle:ratio_rate1m",
            f'clamp_max(max by (cluster, instance, gpu) (rate(opsd_gpu_throttle_seconds_total{{reason=~"{THROTTLES}"}}'
            "[1m])), 1)",
        ),
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
