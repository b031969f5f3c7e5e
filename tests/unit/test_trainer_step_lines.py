"""The lines of the trainer on the terminal."""

from __future__ import annotations

from typing import Any

from opsd.trainer.telemetry import StepLines


def metrics(step: int, **values: Any) -> dict[str, Any]:
    usual = {"loss": 4.0, "z_loss": 0.0, "grad_norm": 0.8412, "lr": 3e-3, "step_s": 0.5, "tokens_per_s": 2000.0}
    return {"step": step, **usual, "mfu": None, **values}


def printed(*lines: dict[str, Any], every: int = 10, steps: int = 100, color: bool = False) -> list[str]:
    said: list[str] = []
    log = StepLines(every, steps, lambda: "1.0 GiB", say=said.append, color=color)
    for line in lines:
        log.note(line)
    return said


def test_the_first_step_every_tenth_and_the_last() -> None:
    """The first line of a start says at once that it trains; the last has no time left."""
    said = printed(*(metrics(step) for step in range(87, 101)))
    assert [line.split()[1] for line in said] == ["87/100", "90/100", "100/100"]
    assert "ETA 5.0 s" in said[1] and "ETA" not in said[2]
    assert printed(*(metrics(step) for step in range(20)), every=0) == []


def test_rates_are_those_since_the_line_before() -> None:
    """One slow step is seen in the line of its ten, and in no other."""
    said = printed(metrics(10), *(metrics(n, step_s=1.0, tokens_per_s=1000.0) for n in range(11, 21)), metrics(30))
    assert ["2,000 tokens/s" in said[0], "1,000 tokens/s" in said[1], "2,000 tokens/s" in said[2]] == [True] * 3


def test_the_whole_line() -> None:
    """Loss with the z-loss and the cross-entropy without it; MFU only if it is known; no escape codes."""
    line = printed(metrics(10, loss=4.25, z_loss=0.125, mfu=0.412))[0]
    assert line == (
        "step  10/100  loss 4.3750  cross-entropy 4.2500  grad norm 0.841  lr 3.00e-03  2,000 tokens/s  "
        "MFU 41.2%  memory 1.0 GiB"
    )


def test_what_is_not_finite_is_said_and_red_on_a_terminal() -> None:
    """None stands for what is not finite in the metrics."""
    assert "loss not finite  grad norm not finite" in printed(metrics(10, loss=None, grad_norm=None))[0]
    assert "\x1b[31mnot finite" in printed(metrics(10, loss=None), color=True)[0]
