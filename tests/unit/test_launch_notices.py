"""Who is not at the terminal hears of start, restarts, standstill and end of a run, and of no failure to tell."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

from opsd.launch.run.notices import RESTART_S, STUCK_S, Notices, Sender
from tests.fakes.clock import until
from tests.fakes.webhook import Webhook


class Stage:
    """A run whose time and steps pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.step: int | None = None
        self.sent: list[tuple[str, Mapping[str, object]]] = []
        self.notices = Notices("tiny", "7", lambda text, fields: self.sent.append((text, fields)), lambda: self.now)
        self.notices.lead(lambda: self.step)

    def after(self, seconds: float, step: int | None = None) -> list[str]:
        """What was told since the last call."""
        self.now += seconds
        self.step = self.step if step is None else step
        self.notices.look()
        told, self.sent = [text for text, _ in self.sent], []
        return told


def test_a_restart_is_told_once_it_has_succeeded() -> None:
    """With its cause and its cost in one message."""
    stage = Stage()
    stage.notices.began({"world_size": 8, "nodes": ["a", "b"]})
    assert stage.after(1, step=5) == ["tiny started: 8 ranks on a, b"]
    stage.notices.interrupted("rank 3 on b failed after step 5 with exit code 1")
    assert stage.after(2) == []
    stage.notices.ranks_started()
    stage.notices.resumed("it goes on with step 4 after 2.0 s; 2 steps are done again", 2)
    (sent,) = stage.sent
    assert sent[0].endswith("exit code 1; it goes on with step 4 after 2.0 s; 2 steps are done again")
    assert sent[1]["event"] == "restarted" and sent[1]["reason"] == "rank 3 on b failed after step 5 with exit code 1"
    assert (sent[1]["run"], sent[1]["job"], sent[1]["step"]) == ("tiny", "7", 5)


def test_a_restart_that_lasts_is_told_before_its_end() -> None:
    """Once; the message about its success follows, and a program without steps succeeds when its ranks run."""
    stage = Stage()
    stage.notices.interrupted("node b is lost")
    stage.notices.interrupted("the ranks cannot be started")
    assert stage.after(RESTART_S) == ["tiny is being restarted: the ranks cannot be started"]
    assert stage.after(RESTART_S) == []
    stage.notices.ranks_started()
    assert stage.after(0) == ["tiny restarted: the ranks cannot be started; the ranks run again"]
    assert stage.after(STUCK_S * 3) == []


def test_no_step_for_long_is_a_standstill() -> None:
    """Told once, with the last step; so is the next step. Before the first step the launcher has its own limit."""
    stage = Stage()
    assert stage.after(STUCK_S * 2) == []
    assert stage.after(1, step=12) == [] and stage.after(STUCK_S - 1) == []
    assert stage.after(1) == ["tiny is stuck: no step for 30 min; the last one is step 12"]
    assert stage.after(STUCK_S) == []
    assert stage.after(1, step=13) == ["tiny makes progress again, with step 13"]


def test_steps_that_are_long_or_done_again_are_no_standstill() -> None:
    """Ten usual steps may pass, and the time in which known steps are repeated, as they reach no further."""
    stage = Stage()
    stage.after(0, step=1)
    assert stage.after(600, step=2) == [] and stage.after(6000 - 1) == []
    assert stage.after(1)[0].startswith("tiny is stuck: no step for 1 h 40 min")
    again = Stage()
    again.after(0, step=0)
    again.after(1000, step=1000)
    again.notices.interrupted("node b is lost")
    again.notices.resumed("it goes on with step 1", 1000)
    again.after(0)
    assert again.after(STUCK_S + 999) == []
    assert again.after(1)[0].startswith("tiny is stuck")


def test_the_end_has_reason_and_report() -> None:
    """For programs as fields, for people in the text."""
    stage = Stage()
    stage.notices.finished(1, "rank 0 failed", "failed (rank 0 failed): 12 steps", Path("/r/report.html"))
    ((text, fields),) = stage.sent
    assert text == "tiny failed (rank 0 failed): 12 steps; report: /r/report.html"
    assert fields["event"] == "finished" and fields["exit_code"] == 1 and fields["report"] == "/r/report.html"


def test_a_dead_receiver_is_one_line_and_the_others_are_told(webhook: Webhook, tmp_path: Path) -> None:
    """No secret is in it. A file is read for each message, so that one may be mended while the run goes on."""
    said: list[str] = []
    file = tmp_path / "urls"
    sender = Sender(["http://127.0.0.1:9/s3cret", str(file), webhook.url], said.append)
    for text in ("one", "two"):
        sender(text, {})
    sender.flush(20.0)
    assert [post["text"] for post in webhook.posts] == ["one", "two"]
    assert len(said) == 2 and "s3cret" not in "".join(said)
    assert any(
        one.startswith("not notified: 127.0.0.1: the webhook could not be reached: Connection refused;") for one in said
    )
    file.write_text(webhook.url)
    sender("three", {})
    sender.flush(20.0)
    assert len(webhook.posts) == 4 and len(said) == 2


def test_a_silent_receiver_delays_no_other(webhook: Webhook) -> None:
    """It has 10 s for each message; the end of a run waits for 5 s."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sender = Sender([f"http://127.0.0.1:{silent.getsockname()[1]}/", webhook.url], lambda _: None)
        for text in ("one", "two"):
            sender(text, {})
        until(lambda: [post["text"] for post in webhook.posts] == ["one", "two"], within_s=8.0)
