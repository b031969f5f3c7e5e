"""What `opsd top` and `opsd status` draw, and how they fit it onto the terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from opsd.commands.gpu_state import gpu_state
from opsd.commands.top import Curves, View, screen, sparkline


def gpu(index: int = 0, **fields: Any) -> dict[str, Any]:
    usual = {"index": index, "lost": None, "orphans": [], "simulated": False, "power_watts": 300.0}
    gauges = {"utilization_percent": 97.0, "temperature_celsius": 60.0, "sm_clock_mhz": 1980, "memory_used_mib": 7e4}
    return {**usual, **gauges, **fields}


def rank(number: int, **fields: Any) -> dict[str, Any]:
    usual = {"rank": number, "run": "smol", "gpu": number, "phase": "forward", "phase_s": 0.1, "step": 7, "live": True}
    return {**usual, "step_s": 1.0, **fields}


def incident(gpu: int | None = None, severity: str = "warning", **fields: Any) -> dict[str, Any]:
    usual = {"id": "i-1", "kind": "gpu_xid", "severity": severity, "state": "open", "summary": "GPU reports Xid 79"}
    rest = {"culprit": {"gpu": gpu}, "opened_at": 100.0, "resolved_at": None, "symptoms": [], "actions": []}
    return {**usual, **rest, "evidence": [{"text": "Xid 79 in the kernel log", "source": "kmsg"}], **fields}


def status(gpus: int = 2, ranks: int = 2) -> dict[str, Any]:
    runs = [{"run": "smol", "state": "running", "alive": True}]
    node = {"node": "n01", "version": "1", "mode": "act", "tick_age_s": 0.5, "runs": runs if ranks else []}
    return {**node, "gpus": [gpu(n) for n in range(gpus)], "ranks": [rank(n) for n in range(ranks)]}


def drawn(width: int, height: int | None, incidents: list[dict[str, Any]], view: View | None = None, **of: int) -> str:
    console = Console(width=width, height=height or 25, file=io.StringIO(), record=True)
    console.print(screen(status(**of), incidents, 200.0, view=view, height=height, width=width))
    return console.export_text()


def test_the_screen_fits_and_counts_what_does_not() -> None:
    """Sixteen GPUs and as many ranks on 80x24: nothing is pushed off, and the rest is counted."""
    for width, height in ((80, 24), (120, 40), (200, 50)):
        text = drawn(width, height, [incident(3)], gpus=16, ranks=16)
        lines = text.splitlines()
        assert len(lines) <= height and all(len(line) <= width for line in lines)
        assert "GPU reports Xid 79" in text and "q quit" in lines[-1]
        assert ("more" in text) == (height < 50)


def test_a_long_sentence_is_cut_and_takes_one_row() -> None:
    """Else eight GPUs with the same trouble would push ranks and runs off the screen."""
    long = [incident(0, summary="GPU 0 is throttled by " + "one reason and " * 20)]
    lines = drawn(80, 30, long).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("0  ") and "…" in line for line in lines) == 1
    assert any(line.startswith("1  ") for line in lines)


def test_scrolling_and_views() -> None:
    """Each table has the screen to itself, and the keys reach its last row and no further."""
    view = View()
    view.press("3")
    for _ in range(99):
        view.press("down")
    text = drawn(80, 24, [], view, ranks=64)
    assert view.name == "ranks" and "\n63 " in text and "above" in text and "\n0 " not in text
    view.press("2")
    assert view.offset == 0 and "GPUs" in drawn(80, 24, [], view, gpus=2)
    view.press("")
    assert view.name == "GPUs"


def test_the_time_that_is_left_is_shown_if_the_program_says_its_last_step() -> None:
    """At the speed of the latest step of the slowest rank."""
    shown = status(0, 2)
    shown["ranks"] = [rank(0, planned_step=127, step_s=0.5), rank(1, planned_step=127, step_s=1.0)]
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(screen(shown, [], 200.0))
    assert "step 7 of 127, ETA 2 min" in console.export_text()


def test_ranks_are_sorted_by_what_is_asked_for() -> None:
    """The slowest rank comes first after one press of s."""
    view = View(name="ranks")
    view.press("s")
    shown = status(0, 3)
    shown["ranks"][1]["step_s"] = 9.0
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(screen(shown, [], 200.0, view=view))
    assert console.export_text().splitlines()[3].startswith("1 ")


def test_the_chosen_incident_is_shown_in_full() -> None:
    """Evidence, and the runbook that says what to do."""
    text = drawn(100, 40, [incident(), incident(kind="gpu_lost", summary="GPU 5 is gone")], View("incidents", offset=1))
    assert "gpu_lost, warning, open" in text and "opsd runbook show gpu_lost" in text and "Xid 79 in the kernel" in text


def test_curves_take_each_step_once_and_survive_a_restart() -> None:
    """Tokens of all ranks are added up; a run that goes on from a checkpoint adds its steps again."""
    curves = Curves()

    def steps(*numbers: int) -> list[dict[str, Any]]:
        return [{"step": n, "loss": 5.0 - n, "tokens": 100, "duration_s": 0.5} for n in numbers]

    curves.add([{"run": "a", "rank": 0, "steps": steps(1, 2)}, {"run": "a", "rank": 1, "steps": steps(1, 2)}])
    curves.add([{"run": "a", "rank": 0, "steps": steps(1, 2, 3)}])
    assert list(curves.loss["a"]) == [4.0, 3.0, 2.0]
    assert list(curves.speed["a"]) == [400.0, 400.0, 200.0]
    curves.add([{"run": "a", "rank": 0, "steps": steps(2)}])
    assert list(curves.loss["a"])[-1] == 3.0
    curves.add([{"run": "a", "rank": 0, "steps": [{"step": 9, "loss": float("nan"), "tokens": 0, "duration_s": 0.0}]}])
    assert len(curves.loss["a"]) == 4
    assert sparkline([1, 2, 3, 4], 3) == "▁▅█" and sparkline([], 3) == ""


def test_the_state_of_a_gpu_is_the_worst_that_is_known() -> None:
    """Lost, then its incidents, processes of the dead, heat, its rank, busy or idle."""
    found, ranks = [incident(1), incident(1, "critical", summary="row remap failed")], [rank(0)]
    assert gpu_state(gpu(1, lost="fell off the bus"), found, ranks) == ("lost: fell off the bus", "bold red")
    assert gpu_state(gpu(1), found, ranks) == ("row remap failed (+1 more)", "bold red")
    assert gpu_state(gpu(orphans=[7]), [], ranks)[0] == "held by dead processes: 7"
    assert gpu_state(gpu(temperature_celsius=92.0), [], ranks) == ("at its heat limit", "bold red")
    assert gpu_state(gpu(temperature_celsius=80.0, temperature_margin_celsius=3.0), [], []) == ("hot", "yellow")
    assert gpu_state(gpu(temperature_celsius=88.0, temperature_margin_celsius=9.0), [], ranks)[1] == "green"
    assert gpu_state(gpu(), [incident(1)], ranks) == ("rank 0 of smol", "green")
    assert gpu_state(gpu(), [], [])[0] == "busy, no rank of a run"
    jobs = [{"job": "72", "user": "bob", "gpus": [0, 1], "idle_s": {"1": 90.0}}]
    assert gpu_state(gpu(), [], [], jobs) == ("job 72 of bob", "green")
    assert gpu_state(gpu(1), [], [], jobs) == ("job 72 of bob, idle", "yellow")
    assert gpu_state(gpu(), [], ranks, jobs) == ("rank 0 of smol", "green")
    assert gpu_state(gpu(utilization_percent=0.0), [], []) == ("idle", "dim")
    assert gpu_state(gpu(), [incident(0, resolved_at=9.0)], ranks)[0] == "rank 0 of smol"
