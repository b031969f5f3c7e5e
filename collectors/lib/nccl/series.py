"""The series of the NCCL collector."""

from __future__ import annotations

from typing import Final

from opsd.collectors.base import Metric

RAS_UP = Metric("opsd_nccl_ras_up", "1 if NCCL's RAS service answered the last question.")
RAS_AGE = Metric("opsd_nccl_ras_answer_age_seconds", "Time since the last answer of RAS.", unit="seconds")
COMMUNICATORS = Metric("opsd_nccl_communicators", "NCCL communicators of the job, by RAS.")
PROBLEMS = Metric("opsd_nccl_problems", "Problems that RAS reports right now.", labels=("kind",))
STALLED = Metric(
    "opsd_nccl_stalled_seconds",
    "How long some ranks have been the same number of operations behind others, by RAS; 0 while all move on.",
    unit="seconds",
)
LOGS = Metric("opsd_nccl_rank_logs", "Rank logs on this node that are followed for messages of NCCL.", labels=("run",))
MESSAGES = Metric(
    "opsd_nccl_log_messages_total", "Messages of NCCL in the log of a rank.", "counter", "", ("run", "rank", "kind")
)

METRICS: Final = (RAS_UP, RAS_AGE, COMMUNICATORS, PROBLEMS, STALLED, LOGS, MESSAGES)
