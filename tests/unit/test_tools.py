"""What the long tests judge by."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.adversary.soak.observe import Observed, series
from tests.adversary.soak.verdict import (
    Plant,
    incidents_verdict,
    memory_verdict,
    peak_verdict,
    scrape_verdict,
    slope,
    ticks_verdict,
)
from tests.fakes.fuzzing import FEW, MANY, fuzz
from tests.fakes.partition import Trace, check_commits, check_steps
from tests.fakes.tree import ROOT
from tests.fakes.tutorial import Shell, Step, fits, play, steps

# What the matrix of faults fails for.


def trace(generation: int, first: float, last: float, *commits: float) -> Trace:
    return Trace(generation, 0, 1, "n1", (first, last), commits)


def test_two_generations_at_once_are_seen() -> None:
    """From the end of the fault, or from when the second began, for a few seconds only."""
    check_steps([trace(1, 0.0, 10.0), trace(2, 9.0, 20.0)], healed_at=5.0)
    check_steps([trace(1, 0.0, 10.0), trace(2, 3.0, 20.0)], healed_at=9.0)
    with pytest.raises(AssertionError, match=r"1 and 2 both stepped, for 7\.0 s after healing"):
        check_steps([trace(1, 0.0, 10.0), trace(2, 3.0, 20.0)], healed_at=2.0)
    with pytest.raises(AssertionError, match=r"1 and 2 both stepped, for 5\.0 s after healing"):
        check_steps([trace(1, 0.0, 10.0), trace(2, 3.0, 20.0), trace(3, 21.0, 22.0)], healed_at=5.0)


def test_a_commit_after_a_later_claim_is_seen() -> None:
    """Whatever the fault: the fence does not depend on the network."""
    traces = [trace(1, 0.0, 10.0, 1.0, 5.0), trace(2, 6.0, 20.0, 19.0)]
    check_commits(traces, {1: (0.0, 0), 2: (4.5, 0)})
    with pytest.raises(AssertionError, match=r"generation 1 committed 2\.0 s after a later one was claimed"):
        check_commits(traces, {1: (0.0, 0), 2: (3.0, 0)})
    with pytest.raises(AssertionError, match=r"generation 2 committed"):
        check_commits(traces, {1: (0.0, 0), 2: (4.5, 0), 3: (17.0, 0)})
    check_commits(traces, {1: (0.0, 0), 2: (4.5, 0), 3: (17.0, 2)})  # its ranks run on


# What the test of the tutorials takes for equal, and what it does not.


@pytest.mark.parametrize(
    ("shown", "printed", "equal"),
    [
        ("loss 2.34 after 12.1 s", "loss 1.99 after  7.4 s", True),
        ("0 failed, 1200 passed", "0 failed, 900 passed", True),
        ("0 failed", "1 failed", False),
        ("a\n...\nd", "a\nb\nc\nd", True),
        ("a\n...\nd", "a\nb\nc", False),
        ("a", "a\nb", False),
        ("in ... s", "in a few s", True),
        ("2026-11-23 05:10", "2027-01-02 19:44:05", True),
        ("│ productive │ 34.18 │", "┃ productive ┃ 1.5 ┃", True),
        ("(a|b)*", "(a|b)*", True),
        ("a.c", "abc", False),
    ],
)
def test_what_is_printed_is_compared_but_for_what_varies(shown: str, printed: str, equal: bool) -> None:
    """Numbers that are measured may differ; counts and words may not."""
    assert fits(shown.splitlines(), printed) is equal


def test_a_page_is_run_in_one_shell(tmp_path: Path) -> None:
    """Folders and variables stay; a failure that the page does not show is one, and so is other output."""
    page = tmp_path / "page.md"
    page.write_text(
        "Text.\n\n```console\n$ mkdir a && cd a\n$ cat > f <<'END'\n> x 1.5\n> END\n$ cat f\nx 2.5\n$ false\n[1]\n```\n"
    )
    assert [*steps(page)][1:3] == [Step("cat > f <<'END'\nx 1.5\nEND", ()), Step("cat f", ("x 2.5",))]
    with Shell(tmp_path, {}) as shell:
        play(page, shell, 20)
        for wrong in ("$ cat f\ny 2.5", "$ false", "$ true\n[1]"):
            page.write_text(f"```console\n{wrong}\n```\n")
            with pytest.raises(AssertionError):
                play(page, shell, 20)


def test_a_block_that_no_test_runs_is_refused(tmp_path: Path) -> None:
    """Commands in another kind of block would go unnoticed."""
    (tmp_path / "page.md").write_text("```\n$ true\n```\n")
    with pytest.raises(AssertionError, match="run by no test"):
        list(steps(tmp_path / "page.md"))


def test_a_command_that_never_ends_is_named_and_ended(tmp_path: Path) -> None:
    """What the page waits for in vain is what its author has to know."""
    page = tmp_path / "page.md"
    page.write_text("```console\n$ echo so far\nso far\n$ until test -e never; do sleep 0.1; done\n```\n")
    with pytest.raises(TimeoutError, match="until test -e never"), Shell(tmp_path, {}) as shell:
        play(page, shell, 1)


# What the observations of a soak come to: each kind of failure is found, and a good hour is good.


PLANT = Plant(1000.0, "GPU-0", 8)


def memory(growth: float) -> list[tuple[float, float]]:
    """An hour with the noise of an allocator, large answers a third of the time, and ``growth`` in MiB an hour."""
    draw = random.Random(7)
    answers = [draw.choice((0, 0, draw.uniform(0, 40))) for _ in range(360)]
    return [(float(at), 80 + growth * at / 3600 + draw.uniform(-1, 1) + answers[at // 10]) for at in range(3600)]


@pytest.mark.parametrize(("growth", "flat"), [(0.0, True), (1.0, True), (5.0, False), (60.0, False)])
def test_memory_that_grows_is_found(growth: float, flat: bool) -> None:
    """The interval has the true slope in it, and an hour is enough to tell."""
    found = slope(memory(growth))
    assert found.low <= growth <= found.high and found.high - found.low < 2.0
    assert (memory_verdict(found, 3600) == "") is flat
    assert memory_verdict(found, 60) == ""


def test_memory_near_the_limit_is_found() -> None:
    """However short it was."""
    assert peak_verdict(199.0) == ""
    assert peak_verdict(256.0) == "memory was at 256 MiB"


def incident(**changes: Any) -> Mapping[str, Any]:
    known = {"id": "i", "kind": "gpu_xid", "data": {"uuid": "GPU-0"}, "opened_at": 1001.0, "state": "resolved"}
    return known | changes


def said(state: str, id: str = "i") -> Mapping[str, Any]:
    return {"id": id, "text": f"[warning] node1: gpu_xid {state}: GPU 0: Xid 8"}


TOLD = [said("opened"), {"text": "GPU 0: restart", "target": "node1"}, said("resolved")]


def test_a_fault_that_was_journalled_and_told_once_is_good() -> None:
    """Notices without an incident, and other incidents, count for nothing."""
    assert incidents_verdict([PLANT], [incident(), incident(id="x", kind="loss_nan")], TOLD) == []


@pytest.mark.parametrize(
    ("journal", "told", "expected"),
    [
        ([], TOLD, "0 incidents in the journal"),
        ([incident(), incident(id="j")], TOLD, "2 incidents in the journal"),
        ([incident(opened_at=1100.0)], TOLD, "0 incidents in the journal"),
        ([incident(state="verifying")], TOLD, "verifying in the journal"),
        ([incident()], TOLD[1:], "told 0 times that it was opened"),
        ([incident()], [*TOLD, said("resolved")], "told 2 times that it was resolved"),
        ([incident()], [*TOLD, said("opened", "other"), said("opened", "other")], "1 incidents were opened more"),
    ],
)
def test_what_is_lost_or_told_twice_is_found(journal: list[Any], told: list[Any], expected: str) -> None:
    """In a sentence that names the fault."""
    assert any(expected in sentence for sentence in incidents_verdict([PLANT], journal, told))


def test_scrapes_that_are_late_or_missing_are_found() -> None:
    """And data that is old."""
    assert scrape_verdict(Observed(scrapes=[0.01, 0.9], stale_s=5.0)) == []
    assert len(scrape_verdict(Observed(scrapes=[1.5], unanswered=[7.0], stale_s=60.0))) == 3


def test_what_the_agent_says_of_itself_is_heard() -> None:
    """Ticks, records, runbooks and collectors."""
    good = 'opsd_agent_missed_ticks_total 0.0\nopsd_collector_state{collector="nvml",state="hung"} 0.0\n'
    assert ticks_verdict(series(good)) == []
    bad = good.replace(" 0.0", " 1.0") + 'opsd_runbook_errors_total{kind="x"} 2.0\nopsd_journal_lost_records_total 3\n'
    assert len(ticks_verdict(series(bad))) == 4


# The fuzz targets: what goes wrong once is tried for ever, and the long tests try what they say.


TARGETS = "\n".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "tests/fuzz").glob("test_*.py")))


def test_what_went_wrong_once_is_tried_first() -> None:
    """Before anything that is made up; what goes wrong is not swallowed."""
    seen = list[int]()
    fuzz(seen.append, st.integers(), FEW, seeds=(1 << 99, -(1 << 99)))
    assert set(seen[:2]) == {1 << 99, -(1 << 99)} and len(seen) == FEW + 2

    def fail(number: int) -> None:
        assert number != 1 << 99

    with pytest.raises(AssertionError):
        fuzz(fail, st.just(0), FEW, seeds=[1 << 99])


def test_the_long_tests_try_ten_thousand() -> None:
    """Of each input, and `make test-long` runs them."""
    seen = list[int]()
    fuzz(seen.append, st.integers(), MANY)
    assert len(seen) == MANY == 10_000
    assert re.search(
        r"^test-long:.*\n(?:\t.*\n)*\t.*pytest.* -m long tests/fuzz$", (ROOT / "Makefile").read_text(), re.M
    )


@pytest.mark.parametrize(
    "given",
    ["any request", "any rank page", "any event", "any run json", "any record", "any answer", "any manifest",
     "any file", "any document"],
)  # fmt: skip
def test_every_input_of_others_has_a_target(given: str) -> None:
    """HTTP, rank pages, events, run.json, kernel log, RAS, manifests, configuration and journal, in both amounts."""
    name = given.replace("any", "no", 1).replace(" ", "_")
    assert re.search(rf"@AMOUNTS\ndef test_{name}_is_a_bug\(amount: int", TARGETS)
