"""The end of a run that has something to wait for: it is seen to wait, and a stop does not wait long."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from trainer_world import Run, World

from opsd.rank_page import write_request
from tests.fakes.clock import until


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a storage that refuses its first client, that of the start, and lets all others wait."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        yield f"ftp://127.0.0.1:{server.getsockname()[1]}/run"


def changed(world: World) -> float:
    page = world.page(0)
    assert page is not None
    return page.changed


@pytest.mark.slow
def test_an_upload_is_waited_for_visibly_and_not_by_a_run_that_is_to_stop(run: Run, silent: str) -> None:
    """The page changes while the last upload is on its way; asked to stop, the run ends well and leaves it behind."""
    world = run.start("--fresh", world=1, run__steps=5, checkpoint__remote=silent)

    def waits() -> bool:
        page = world.page(0)
        return page is not None and page.committed_step == 5 and page.phase == "checkpoint"

    until(waits)
    before = time.monotonic()
    until(lambda: changed(world) > before)
    write_request(world.pages[0], "checkpoint_and_stop")
    assert world.wait() == [0], run.log().read_text()
    assert not run.events("checkpoint_upload_failed")  # it has neither been waited for nor given up
    assert list(run.checkpoints.glob("*/awaiting-upload"))


def test_evaluations_do_not_hold_up_a_stop(run: Run) -> None:
    """A run that is asked to stop while it waits for an evaluation ends that too, and ends well."""
    world = run.start(world=1, run__steps=5, evaluation__harness="true {model}", evaluation__queue="sleep 1000")
    waiting = until(lambda: (page := world.page(0)) is not None and page.phase == "evaluation" and page)
    assert waiting.committed_step == 5
    write_request(world.pages[0], "checkpoint_and_stop")
    assert world.wait() == [0], run.log().read_text()
    assert list(run.checkpoints.glob("*/awaiting-evaluation"))
