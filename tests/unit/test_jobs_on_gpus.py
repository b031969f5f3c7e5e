"""What the API and the pages say about Slurm's jobs on the GPUs."""

from __future__ import annotations

import json

from opsd.agent.loop import Snapshot
from opsd.agent.web import api
from opsd.agent.web.api import cost_text, jobs_on_gpus
from opsd.collectors.base import Sample
from opsd.collectors.jobs import IDLE
from opsd.collectors.lib.rank_series import JOB_INFO
from opsd.collectors.slurm import JOB
from tests.unit.test_page import Structure, page, snapshot

SAMPLES = (
    Sample(JOB, 1.0, ("72", "bob", "gpu", "running")),
    Sample(JOB_INFO, 1.0, ("1", "72", "", "")),
    Sample(JOB_INFO, 1.0, ("0", "72", "", "")),
    Sample(JOB_INFO, 1.0, ("3", "8", "smol", "0")),
    Sample(JOB_INFO, 1.0, ("2", "", "other", "0")),
    Sample(IDLE, 7200.0, ("1", "72")),
    Sample(IDLE, 3.0, ("0", "72")),
)


def test_each_job_has_its_owner_gpus_and_idle_gpus() -> None:
    """Whether it has rank pages or not; a run outside Slurm is no job."""
    first, second = jobs_on_gpus(Snapshot(1, 0.0, 0.0, samples=(SAMPLES,)))
    assert (first.job, first.user, first.gpus, first.idle_s) == ("8", "", (3,), {})
    assert (second.job, second.user, second.partition, second.gpus) == ("72", "bob", "gpu", (0, 1))
    assert (second.idle_s, second.idle_gpu_hours) == ({1: 7200.0}, 2.0)


def test_idle_gpu_hours_have_a_price_where_one_is_known() -> None:
    """The price comes from the agent's configuration."""
    assert cost_text(2.0, {"gpu_hour": 2.5, "currency": "EUR"}) == "2.0 GPU-hours, 5.00 EUR"
    assert cost_text(2.0, {"gpu_hour": 0.0, "currency": "EUR"}) == "2.0 GPU-hours"


def test_the_status_and_the_page_show_them() -> None:
    """The same jobs in both."""
    shown = snapshot(samples=(SAMPLES,))
    answer = json.loads(api.encode(api.status(shown, {}, 0.0)))
    assert [job["idle_s"] for job in answer["jobs"]] == [{}, {"1": 7200.0}]
    assert "bob" in Structure(page(shown)).text
