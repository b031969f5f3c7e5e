"""The slurm collector and the watch that asks for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from opsd.agent.collectors import NodeWatch
from opsd.collectors.base import NoData, Reading
from opsd.collectors.lib.gpu_owners import GpuOwners
from opsd.collectors.slurm import (
    CONFIDENCE,
    COUNTED,
    FAULTS,
    LEMON,
    METRICS,
    SCORE,
    NodeRecord,
    SlurmCollector,
    SlurmReport,
)
from opsd.slurm.port import Given, Job, Node, SlurmDenied, SlurmError, SlurmMissing, SlurmUnavailable
from tests.fakes.slurm import FakeSlurm


def job(number: int) -> Job:
    """A running job on n1."""
    return Job(number, "running", "", "alice", "train", ("n1",), "n1", 0.0, 0.0, None, 0, "x")


class Timeline:
    """A collector whose reports and clock the test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.report = SlurmReport()
        self.collector = SlurmCollector(
            lambda: self.report, "n1", stale_s=60.0, clock=lambda: self.now, wall=lambda: self.now
        )

    def answer(self, node: Node | None, jobs: Sequence[Job] = ()) -> Reading:
        """Slurm answers now; what the collector makes of it."""
        self.report = SlurmReport(self.now, node, jobs)
        return self.collect()

    def collect(self) -> Reading:
        """One collection that has something to tell."""
        reading = self.collector.collect()
        assert isinstance(reading, Reading)
        return reading


def values(reading: Reading) -> dict[tuple[str, ...], float]:
    """The samples by name and labels."""
    return {(sample.metric.name, *sample.labels): sample.value for sample in reading.samples}


def test_state_flags_reason_and_jobs_are_exported() -> None:
    """Every base state and flag has a series, so that a change is a change of values and not of series."""
    drained = Node("n1", "mixed", frozenset({"drain"}), "opsd:42 gpu_xid", "root")
    found = values(Timeline().answer(drained, [job(7)]))
    assert found["opsd_slurm_up",] == 1
    assert found["opsd_slurm_node_state", "mixed"] == 1
    assert found["opsd_slurm_node_state", "idle"] == 0
    assert found["opsd_slurm_node_flag", "drain"] == 1
    assert found["opsd_slurm_node_flag", "not_responding"] == 0
    assert found["opsd_slurm_node_reason_info", "opsd:42 gpu_xid", "root"] == 1
    assert found["opsd_slurm_job_info", "7", "alice", "train", "running"] == 1
    assert found["opsd_slurm_jobs",] == 1
    remembered = {FAULTS.name, SCORE.name, CONFIDENCE.name, LEMON.name, COUNTED.name}
    assert {name[0] for name in found} == {metric.name for metric in METRICS} - remembered


def test_what_slurm_remembers_is_exported() -> None:
    """The confidence only where it was asked for."""
    timeline = Timeline()
    for record, told in ((NodeRecord(1, 1.0), set()), (NodeRecord(3, 4.0, 0.97, True), {0.97})):
        timeline.report = SlurmReport(timeline.now, Node("n1", "idle"), record=record)
        found = values(timeline.collect())
        assert (found["opsd_node_faults",], found["opsd_node_score",]) == (record.faults, record.score)
        assert found["opsd_node_lemon",] == record.lemon
        assert {v for (name, *_), v in found.items() if name == "opsd_node_lemon_confidence_ratio"} == told


def test_whether_failed_jobs_are_counted_is_exported() -> None:
    """Not before anybody has looked: unknown is neither yes nor no."""
    timeline = Timeline()
    for counted in (None, False, True):
        timeline.report = SlurmReport(timeline.now, Node("n1", "idle"), jobs_counted=counted)
        assert values(timeline.collect()).get((COUNTED.name,)) == counted


def test_changes_are_events_and_the_first_answer_is_not() -> None:
    """A drain, a job that comes and one that goes are told once each."""
    timeline = Timeline()
    assert timeline.answer(Node("n1", "idle"), [job(7)]).events == ()
    assert timeline.collect().events == ()
    timeline.now += 20
    reading = timeline.answer(Node("n1", "idle", frozenset({"drain"}), "NHC: disk", "root"), [job(8)])
    assert [event.kind for event in reading.events] == ["slurm_node_changed", "slurm_job_ended", "slurm_job_started"]
    assert reading.events[0].message == "Slurm has n1 as idle+drain: NHC: disk (by root)"
    assert reading.events[0].data["previous"] == "idle"
    assert [event.data["job"] for event in reading.events[1:]] == ["7", "8"]
    assert timeline.collect().events == ()


def test_a_minute_of_silence_is_visible_and_then_over() -> None:
    """At once: up is 0. After a minute: the node's series vanish, one event. With an answer: all as before."""
    timeline = Timeline()
    timeline.answer(Node("n1", "idle"))
    timeline.now += 20
    timeline.report = SlurmReport(100.0, Node("n1", "idle"), (), "sinfo has not answered within 12 s")
    found = values(timeline.collect())
    assert found["opsd_slurm_up",] == 0
    assert found["opsd_slurm_node_state", "idle"] == 1
    timeline.now += 41
    reading = timeline.collect()
    assert values(reading) == {("opsd_slurm_up",): 0, ("opsd_slurm_answer_age_seconds",): 61}
    assert [event.kind for event in reading.events] == ["slurm_silent"]
    assert "sinfo has not answered" in reading.events[0].message
    assert timeline.collect().events == ()
    timeline.now += 20
    reading = timeline.answer(Node("n1", "idle"))
    assert [event.kind for event in reading.events] == ["slurm_answers"]
    assert values(reading)["opsd_slurm_up",] == 1


def test_a_controller_that_was_never_there_is_silent_too() -> None:
    """An agent that starts while Slurm is down says so after a minute."""
    timeline = Timeline()
    timeline.report = SlurmReport(problem="connection refused")
    assert values(timeline.collect())["opsd_slurm_up",] == 0
    timeline.now += 61
    assert [event.kind for event in timeline.collect().events] == ["slurm_silent"]


def test_absence_is_a_value() -> None:
    """No Slurm, a node that Slurm does not know, and no answer yet are each told apart."""
    timeline = Timeline()
    assert timeline.collector.collect() == NoData("Slurm has not been asked yet")
    timeline.report = SlurmReport(problem="no Slurm commands", absent=True)
    assert timeline.collector.collect() == NoData("no Slurm commands")
    timeline.report = SlurmReport(timeline.now)
    assert isinstance(unknown := timeline.collector.collect(), NoData)
    assert "agent.node" in unknown.reason


def test_the_watch_keeps_the_last_answer_beside_the_problem() -> None:
    """While Slurm is away the report says since when, and what was known then."""
    slurm = FakeSlurm([Node("n1", "idle")], jobs=[job(7)])
    now = 5.0
    watch = NodeWatch(slurm, "n1", clock=lambda: now)
    assert watch.refresh() == SlurmReport(5.0, Node("n1", "idle"), [job(7)], record=NodeRecord(0, 0.0))
    now, slurm.error = 25.0, SlurmUnavailable("away")
    assert watch.refresh() == SlurmReport(5.0, Node("n1", "idle"), [job(7)], "away", record=NodeRecord(0, 0.0))
    slurm.error = SlurmMissing("no Slurm")
    assert watch.refresh() == SlurmReport(problem="no Slurm", absent=True)
    assert NodeWatch(FakeSlurm([]), "n1", clock=lambda: 1.0).refresh() == SlurmReport(1.0)


def test_gpus_that_slurm_does_not_tell_hide_neither_node_nor_jobs() -> None:
    """Those of one job are not shown to this user; at the next one the controller goes away, and is asked again."""
    errors: dict[int, SlurmError] = {7: SlurmDenied("not yours"), 8: SlurmUnavailable("away")}

    class Hesitant(FakeSlurm):
        def given(self, job: int, node: str) -> Given:
            if job in errors:
                raise errors[job]
            return super().given(job, node)

    slurm = Hesitant([Node("n1", "idle")], jobs=[job(7), job(8), job(9)])
    slurm.by_gpu = {(8, "n1"): frozenset({1}), (9, "n1"): frozenset({2, 3})}
    watch = NodeWatch(slurm, "n1", clock=lambda: 5.0)
    report = watch.refresh()
    assert (report.node, len(report.jobs), report.gpus, report.problem) == (Node("n1", "idle"), 3, {}, "")
    del errors[8]
    assert watch.refresh().gpus == {"8": {1}, "9": {2, 3}}


def test_the_sluid_of_a_job_that_ends_is_still_known() -> None:
    """What it has left on a GPU is in its control group, while the GPU is no longer given to it."""
    slurm = FakeSlurm([Node("n1", "idle")], jobs=[job(7), replace(job(8), state="completing")])
    slurm.by_gpu = {(7, "n1"): frozenset({0}), (8, "n1"): frozenset({1})}
    slurm.sluids = {7: "sEKNKTV3WPV500", 8: "sEKNKTV3WPV501"}
    report = NodeWatch(slurm, "n1", clock=lambda: 5.0).refresh()
    assert (report.gpus, report.sluids) == ({"7": {0}}, {"sEKNKTV3WPV500": "7", "sEKNKTV3WPV501": "8"})


def test_a_suspended_job_keeps_its_gpus() -> None:
    """What happens to them is its own; Slurm gives them to no other job."""
    slurm = FakeSlurm([Node("n1", "idle")], jobs=[replace(job(7), state="suspended"), replace(job(8), state="stopped")])
    slurm.by_gpu = {(7, "n1"): frozenset({0}), (8, "n1"): frozenset({1})}
    assert NodeWatch(slurm, "n1", clock=lambda: 5.0).refresh().gpus == {"7": {0}, "8": {1}}


def test_parts_of_gpus_are_told_beside_whole_ones() -> None:
    """A job is on both; only of the parts others may have some too."""
    slurm = FakeSlurm([Node("n1", "idle")], jobs=[job(7), job(8)])
    slurm.by_gpu = {(7, "n1"): frozenset({2}), (8, "n1"): frozenset()}
    slurm.by_share = {(7, "n1"): frozenset({0}), (8, "n1"): frozenset({0})}
    report = NodeWatch(slurm, "n1", clock=lambda: 5.0).refresh()
    assert (report.gpus, report.shares) == ({"7": {0, 2}, "8": {0}}, {"7": {0}, "8": {0}})
    gpu_owners = GpuOwners()
    SlurmCollector(lambda: report, "n1", clock=lambda: 6.0, gpu_owners=gpu_owners).collect()
    assert gpu_owners.shares == {"7": {0}, "8": {0}}


def test_a_requeued_job_is_asked_for_again_once_it_runs() -> None:
    """While its last start ends it has the next restart count already, no GPUs, and still the SLUID of that start."""
    jobs = [replace(job(7), state="completing", restarts=1)]

    class Requeued(FakeSlurm):
        def jobs(self, ids: Sequence[int] = (), *, node: str = "") -> Sequence[Job]:
            return jobs

    slurm = Requeued([Node("n1", "idle")])
    slurm.by_gpu, slurm.sluids = {(7, "n1"): frozenset()}, {7: "s3AHM85DAGQ600"}
    watch = NodeWatch(slurm, "n1", clock=lambda: 5.0)
    assert watch.refresh().sluids == {"s3AHM85DAGQ600": "7"}
    jobs[:] = [replace(job(7), restarts=1)]
    slurm.by_gpu, slurm.sluids = {(7, "n1"): frozenset({0, 1})}, {7: "s3AHM85DAV9400"}
    report = watch.refresh()
    assert (report.gpus, report.sluids) == ({"7": {0, 1}}, {"s3AHM85DAV9400": "7"})


def test_a_comment_that_cannot_be_read_hides_neither_node_nor_jobs() -> None:
    """What Slurm remembers of the node is unknown until it tells; the rest of its answer stands."""
    problem: list[SlurmError] = [SlurmDenied("not yours")]

    class Forgetful(FakeSlurm):
        def comments(self, names: Sequence[str] = ()) -> Mapping[str, str]:
            if problem:
                raise problem[0]
            return super().comments(names)

    watch = NodeWatch(Forgetful([Node("n1", "idle")], jobs=[job(7)]), "n1", clock=lambda: 5.0)
    assert watch.refresh() == SlurmReport(5.0, Node("n1", "idle"), [job(7)])
    problem.clear()
    assert watch.refresh().record == NodeRecord(0, 0.0)


def test_a_slow_slurm_does_not_delay_the_collector() -> None:
    """The watch answers at once with what it has while Slurm is still thinking."""
    release = threading.Event()

    class Slow(FakeSlurm):
        def nodes(self, names: Sequence[str] = ()) -> Sequence[Node]:
            release.wait(30)
            return super().nodes(names)

    watch = NodeWatch(Slow([Node("n1", "idle")]), "n1")
    assert watch() == SlurmReport()
    release.set()
    deadline = time.monotonic() + 30
    while watch().answered_at is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert watch().node == Node("n1", "idle")
