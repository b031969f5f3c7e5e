"""Repairs of a node as series, from the files of a repair."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from collectors.repairs import MOST, OUTCOMES, REMEDIES, RepairsCollector, gpus_renewed_at, read
from opsd.collectors.base import NoData, Reading, RepairStep
from opsd.repair.case_file import CaseFile
from opsd.repair.repair_plan import REMEDIES as REMEDIES_OF_A_REPAIR
from opsd.repair.repair_plan import RETEST, Case, Remedy, closed

OPEN = Case("repair-2", "n1", "gpu_xid", "opsd:gpu_xid-1 gpu_xid: Xid 95", 1000.0, first=Remedy.RESET)
RESET = RepairStep("reset_gpus", 1100.0, "boot", 1200.0, True, "done")


def collector(folder: Path, now: float = 1500.0) -> RepairsCollector:
    return RepairsCollector(folder / "repair", wall=lambda: now)


def series(source: RepairsCollector) -> dict[tuple[str, ...], float]:
    """What is not 0, without the prefix of the names."""
    reading = source.collect()
    assert isinstance(reading, Reading)
    found = {
        (sample.metric.name.removeprefix("opsd_repair_"), *sample.labels): sample.value for sample in reading.samples
    }
    return {key: value for key, value in found.items() if value}


def test_a_node_that_was_never_repaired_has_no_series(tmp_path: Path) -> None:
    """Neither has an agent without a state folder."""
    assert isinstance(collector(tmp_path).collect(), NoData)
    assert isinstance(RepairsCollector(None).collect(), NoData)


def test_an_order_that_nobody_takes_up_grows_old(tmp_path: Path) -> None:
    """Its age is that of the file."""
    CaseFile(tmp_path).order()
    os.utime(tmp_path / "repair/order", (1000.0, 1000.0))
    assert series(collector(tmp_path)) == {("state", "ordered"): 1.0, ("age_seconds",): 500.0}


def test_a_repair_is_followed_from_step_to_step_to_its_end(tmp_path: Path) -> None:
    """By the same collector: the age counts from the first remedy, and ends with the repair."""
    cases, source = CaseFile(tmp_path), collector(tmp_path)
    cases.keep(OPEN)
    assert series(source) == {("state", "waiting"): 1.0, ("age_seconds",): 500.0}
    cases.keep(replace(OPEN, attempts=(RESET, RepairStep(RETEST, 1200.0, "boot"))))
    assert series(source) == {("state", "retest"): 1.0, ("attempts",): 1.0, ("age_seconds",): 400.0}
    cases.keep(closed(replace(OPEN, attempts=(RESET,)), "returned", "", 1300.0))
    assert series(source) == {("state", "returned"): 1.0, ("attempts",): 1.0, ("ended", "returned"): 1.0}


def test_when_the_gpus_were_last_reset_is_known_until_the_next_boot(tmp_path: Path) -> None:
    """From the repair under way and from ended ones; a reset that failed has changed nothing."""
    cases, folder = CaseFile(tmp_path), tmp_path / "repair"
    assert gpus_renewed_at(folder, lambda: "boot") == 0.0
    once = replace(RESET, uptime_s=50.0, took_s=10.0)
    cases.keep(closed(replace(OPEN, id="repair-1", attempts=(once,)), "returned", "", 1300.0))
    assert gpus_renewed_at(folder, lambda: "boot") == 60.0
    again = replace(once, what="reload_driver", uptime_s=500.0)
    cases.keep(
        replace(OPEN, attempts=(again, replace(once, ok=False, uptime_s=800.0), RepairStep(RETEST, 1.0, "boot")))
    )
    (folder / "repair-0.json").write_text("garbage")
    assert gpus_renewed_at(folder, lambda: "boot") == 510.0
    assert gpus_renewed_at(folder, lambda: "next boot") == 0.0


def test_a_step_of_the_clock_makes_no_repair_old(tmp_path: Path) -> None:
    """Nor young, from its first remedy in this boot on; of an earlier one what the clock said then counts."""
    cases = CaseFile(tmp_path)
    rebooted = RepairStep("reboot", 1300.0, "boot", 2000.0, True, uptime_s=90.0)
    for attempts, resumed_at, age_s in (
        ((replace(RESET, uptime_s=50.0),), 0.0, 120.0),
        ((replace(RESET, boot="before", uptime_s=5000.0), rebooted), 0.0, 200.0 + 80.0),
        ((replace(RESET, boot="before", uptime_s=5000.0),), 0.0, 86_400.0),
        ((replace(RESET, uptime_s=50.0),), 87_100.0, 400.0),
    ):
        cases.keep(replace(OPEN, attempts=attempts, resumed_at=resumed_at))
        source = RepairsCollector(
            tmp_path / "repair", wall=lambda: 1100.0 + 86_400.0, uptime=lambda: 170.0, boot=lambda: "boot"
        )
        assert series(source)["age_seconds",] == age_s


def test_a_paused_repair_has_no_age_and_begins_anew_after_it(tmp_path: Path) -> None:
    """It waits for people, who know."""
    cases, source = CaseFile(tmp_path), collector(tmp_path)
    cases.keep(replace(OPEN, attempts=(RESET,), paused="maintenance: firmware"))
    assert series(source) == {("state", "paused"): 1.0, ("attempts",): 1.0}
    cases.keep(replace(OPEN, attempts=(RESET,), resumed_at=1450.0))
    assert series(source) == {("state", "waiting"): 1.0, ("attempts",): 1.0, ("age_seconds",): 50.0}


def test_the_end_of_the_newest_repair_is_the_state(tmp_path: Path) -> None:
    """The earlier ones are counted."""
    for number, end in enumerate(OUTCOMES):
        CaseFile(tmp_path).keep(closed(replace(OPEN, id=f"repair-{number}"), end, "", 1300.0))
    assert series(collector(tmp_path)) == {("state", "left"): 1.0, **{("ended", end): 1.0 for end in OUTCOMES}}


def test_a_record_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    """Which is no healthy value."""
    CaseFile(tmp_path).keep(OPEN)
    for content in ("", "[]", "{}", '{"attempts": [{}], "opened_at": 1, "end": null}'):
        (tmp_path / "repair/case.json").write_text(content)
        assert series(collector(tmp_path)) == {("state", "unknown"): 1.0}


def test_it_knows_the_remedies_of_a_repair() -> None:
    """It must not import them: the agent has no memory for a repair."""
    assert REMEDIES == REMEDIES_OF_A_REPAIR


def test_a_file_that_is_no_record_of_roots_is_unknown(tmp_path: Path) -> None:
    """A link, a pipe, another user's, and one that is too large or has odd values: the agent reads none of them."""
    cases, current = CaseFile(tmp_path), tmp_path / "repair/case.json"
    cases.keep(OPEN)
    written = current.read_text()

    def pipe() -> None:
        current.unlink()
        os.mkfifo(current)

    oddities = (
        lambda: os.chown(current, 12345, 12345),
        lambda: current.write_text(written + " " * (300 << 10)),
        lambda: current.write_text(written.replace("1000.0", "1e300")),
        lambda: current.write_text(written.replace("1000.0", "NaN")),
        lambda: current.write_text(written.replace("repair-2", "../journal")),
        pipe,
    )
    for make_odd in oddities:
        current.unlink()
        current.write_text(written)
        make_odd()
        known = read(tmp_path / "repair")
        assert known is not None
        assert (known.repairs, known.state) == ((), "unknown")


def test_a_record_of_endless_steps_and_texts_is_taken_in_shortened(tmp_path: Path) -> None:
    """A test that makes way for others again and again is a step each time: the first and the last ones count."""
    steps = (RESET, *[RepairStep(RETEST, float(at), "boot", detail="x" * 5000) for at in range(20)] * 10)
    CaseFile(tmp_path).keep(replace(OPEN, attempts=tuple(replace(s, detail=s.detail[:900]) for s in steps)))
    known = read(tmp_path / "repair")
    assert known is not None
    (repair,) = known.repairs
    assert (len(repair.attempts), repair.attempts[0].what, repair.state) == (MOST, "reset_gpus", "retest")


def test_a_record_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    """Of one that lacked who began it, what pauses it, and the uptime."""
    CaseFile(tmp_path).keep(replace(OPEN, attempts=(RESET,)))
    current = tmp_path / "repair/case.json"
    whole = json.loads(current.read_text())
    for name in ("by_hand", "paused", "resumed_at"):
        del whole[name]
    for name in ("uptime_s", "took_s"):
        del whole["attempts"][0][name]
    current.write_text(json.dumps(whole))
    assert series(collector(tmp_path)) == {("state", "waiting"): 1.0, ("attempts",): 1.0, ("age_seconds",): 400.0}
