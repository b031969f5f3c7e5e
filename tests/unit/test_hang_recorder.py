"""Flight recorders in a hang: how they are asked for, kept and believed."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, TypeVar

import pytest

from opsd.collectors.lib.nccl.desync import BETWEEN, MISMATCHED, NEVER_CALLED, NO_DUMP, Desync
from opsd.launch.hangs.hang import CERTAIN, Hang, RankStatus
from opsd.launch.hangs.recorder import RecorderJudge, dump_path, judge_folder, short_path, with_verdict
from opsd.launch.hangs.watch import Dumps, ask_server
from opsd.launch.io.loop import Callback, Loop, Timer
from opsd.launch.ranks.dumps import fit_environment, socket_of
from opsd.rundir import RunFolders

# Flight recorders in a hang: what the launcher keeps of them, and what they say about its verdict.


T = TypeVar("T")


class Held:
    """A loop whose timers and threads are called back by the test."""

    def __init__(self) -> None:
        self.timers: list[Callback] = []
        self.threads: list[Callback] = []

    def time(self) -> float:
        return time.monotonic()

    def later(self, delay_s: float, callback: Callback) -> Timer:
        self.timers.append(callback)
        return Timer(delay_s, callback)

    def run_in_thread(self, work: Callable[[], T], done: Callable[[T | OSError], None], *, key: str = "") -> bool:
        self.threads.append(lambda: done(work()))
        return True


def status(rank: int, process: str = "S") -> RankStatus:
    return RankStatus(rank, "forward", "forward", 7, 100.0, 60.0, 60.0, process)


def hang(rank: int | None, score: int = 10) -> Hang:
    return Hang(rank, "forward", 7, 60.0, 60.0, "why", ("a sentence",), tuple(map(status, range(4))), score)


def verdict(cause: str, *culprits: int, confidence: float = 0.9) -> Desync:
    return Desync(cause, culprits, confidence, "0", "default_pg", 4, "all_reduce", culprits, (), (), (0, 1))


def test_recorders_name_the_rank_if_nobody_stands_out() -> None:
    """Stacks and pages look alike; one rank has not called what the others wait in."""
    found = with_verdict(hang(None, 0), verdict(NEVER_CALLED, 3))
    assert found.rank == 3
    assert found.reason == "rank 3: never called all_reduce 4 of group 0"
    assert "flight recorder: rank 3 did not call it" in found.evidence
    assert found.score == CERTAIN, "more than elapsed time speaks for it: limits stay"


def test_recorders_correct_what_elapsed_time_suggests() -> None:
    """A rank that called something else is the culprit, not the one that stopped first."""
    assert with_verdict(hang(0, 5), verdict(MISMATCHED, 2, confidence=0.85)).rank == 2


def test_a_stopped_process_stays_the_culprit() -> None:
    """What the kernel says of a process is certain; the recorders are added."""
    found = with_verdict(hang(1, 2 * CERTAIN), verdict(NEVER_CALLED, 3))
    assert found.rank == 1
    assert len(found.evidence) > 1


@pytest.mark.parametrize(
    "said", [verdict(BETWEEN), verdict(NO_DUMP, 3, confidence=0.3), verdict(BETWEEN, 3, confidence=0.9)]
)
def test_thin_evidence_names_nobody(said: Desync) -> None:
    """If all have come, or most dumps are missing, the verdict of stacks and pages stays."""
    assert with_verdict(hang(1), said).rank == 1
    assert with_verdict(hang(None), said).rank is None


def test_without_recorders_nothing_changes() -> None:
    """Programs without torch have none."""
    assert with_verdict(hang(1), None) == hang(1)


def dump(folder: Path, rank: int, calls: int, generation: int) -> None:
    """The dump of a rank on gloo that has made so many calls."""
    entries = [
        {
            "record_id": number, "process_group": ["0", "default_pg"], "collective_seq_id": number + 1,
            "p2p_seq_id": 0, "profiling_name": "gloo:all_reduce", "state": "scheduled", "is_p2p": False,
            "time_created_ns": 1_000 + number, "retired": False, "input_sizes": [[4]], "input_dtypes": ["Float"],
            "output_sizes": [[4]],
        }
        for number in range(calls)
    ]  # fmt: skip
    path = dump_path(folder, rank)
    path.parent.mkdir(exist_ok=True)
    content = {"entries": entries, "pg_config": {"0": {"name": "0", "desc": "d", "ranks": "[0, 1, 2]"}}}
    path.write_text(json.dumps(content | {"opsd_generation": generation}))


def test_dumps_of_this_generation_are_judged(tmp_path: Path) -> None:
    """The third rank lags one call behind."""
    for rank, calls in enumerate((5, 5, 4)):
        dump(tmp_path, rank, calls, generation=3)
    found = judge_folder(tmp_path, 3, 3)
    assert found is not None
    assert (found.cause, found.culprits) == (NEVER_CALLED, (2,))


def test_dumps_of_an_earlier_hang_are_not(tmp_path: Path) -> None:
    """A rank that cannot answer this time has left its dump of the time before."""
    for rank, calls in enumerate((5, 5, 4)):
        dump(tmp_path, rank, calls, generation=2 if rank == 2 else 3)
    found = judge_folder(tmp_path, 3, 3)
    assert found is not None
    assert found.no_dump == (2,)
    assert judge_folder(tmp_path, 4, 3) is None


def test_damaged_dumps_are_no_evidence(tmp_path: Path) -> None:
    """Half a file is as good as none."""
    dump_path(tmp_path, 0).parent.mkdir()
    dump_path(tmp_path, 0).write_bytes(b'{"entries": [{, "opsd_generation": 1}')
    assert judge_folder(tmp_path, 1, 2) is None


def test_each_hang_is_judged_once(tmp_path: Path) -> None:
    """By the dumps or, where they are not to be had in time, without; not while it is asked already."""
    loop, said = Held(), list[Desync | None]()
    judge = RecorderJudge(tmp_path, loop)
    for rank, calls in enumerate((5, 5, 4)):
        dump(tmp_path, rank, calls, generation=1)
    for number, first in enumerate((loop.threads, loop.timers), start=1):
        assert judge.judge(1, 3, alone=True, then=said.append)
        assert not judge.judge(1, 3, alone=True, then=said.append)
        first[-1]()
        loop.timers[-1]()
        loop.threads[-1]()
        assert len(said) == number
    assert said[0] is not None
    assert (said[0].culprits, said[1]) == ((2,), None)


def test_the_verdict_of_a_hang_that_is_over_is_of_no_other(tmp_path: Path) -> None:
    """It comes when the next generation hangs, and is asked about."""
    loop, said = Held(), list[str]()
    judge = RecorderJudge(tmp_path, loop)
    judge.judge(1, 1, alone=True, then=lambda _: said.append("first"))
    judge.forget()
    assert judge.judge(2, 1, alone=True, then=lambda _: said.append("second"))
    loop.threads[0]()
    assert said == []
    loop.threads[1]()
    assert said == ["second"]


# Asking ranks for flight recorders: by their channel, else by the server that torch runs in them.


ANSWER_S = 60.0

EMPTY = json.dumps({"entries": [], "pg_config": {}})


def content(calls: int) -> str:
    """What the recorder of a rank holds that has made so many calls, the last of which has not ended."""
    entries = [
        {
            "record_id": number, "process_group": ["0", "default_pg"], "collective_seq_id": number + 1,
            "p2p_seq_id": 0, "profiling_name": "nccl:all_reduce", "time_created_ns": 1_000 + number,
            "state": "completed" if number < 3 else "started", "is_p2p": False, "retired": number < 3,
            "input_sizes": [[4]], "input_dtypes": ["Float"], "output_sizes": [[4]],
        }
        for number in range(calls)
    ]  # fmt: skip
    return json.dumps({"entries": entries, "pg_config": {"0": {"name": "0", "desc": "d", "ranks": "[0, 1, 2]"}}})


class Ranks:
    """Ranks of a run, whose torch answers as ``WorkerServer.cpp`` does: by handler, 404 for one that it has not."""

    def __init__(self, folders: RunFolders) -> None:
        self._folders = folders
        self._servers: list[socketserver.BaseServer] = []

    def rank(self, number: int, *, channel: str | None = None, server: dict[str, str] | None = None) -> Rank:
        """One that has this to say on its channel and by the handlers of its server."""
        rank = Rank(number, Path(socket_of(str(self._folders.page(number)))), channel)
        if server is not None:
            self._serve(rank.socket_path, server)
        return rank

    def _serve(self, path: Path, answers: dict[str, str]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = answers.get(self.path.removeprefix("/handler/"))
                self.send_response(404 if body is None else 200)
                self.end_headers()
                self.wfile.write((body or "Handler not found").encode())

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        self._servers.append(server)

    def close(self) -> None:
        """End their servers."""
        for server in self._servers:
            server.shutdown()
            server.server_close()


class Rank:
    """A rank that can be asked; ``says`` is None if it does not answer on its channel."""

    def __init__(self, number: int, socket_path: Path, says: str | None) -> None:
        self.rank = number
        self.socket_path = socket_path
        self._says = says

    def ask_for_dump(self, path: Path) -> bool:
        """As a rank does."""
        if self._says is not None:
            path.write_text(self._says)
        return True


@pytest.fixture
def folders(tmp_path: Path) -> RunFolders:
    """Of the run r."""
    return RunFolders.create("r", folder=tmp_path / "run", logs=None, shared=tmp_path / "shm")


@pytest.fixture
def ranks(folders: RunFolders) -> Iterator[Ranks]:
    """None at first."""
    ranks = Ranks(folders)
    yield ranks
    ranks.close()


@pytest.fixture
def collect(folders: RunFolders) -> Callable[..., list[bool]]:
    """Awaits the dumps of ranks, in generation 3."""

    def run(*asked: Rank) -> list[bool]:
        dumps = Dumps(asked, folders, 3, Loop(), answer_s=ANSWER_S)
        return [rank.ask_for_dump(folders.dump(rank.rank)) and dumps.collect(rank) for rank in asked]

    return run


def test_a_rank_that_holds_the_interpreter_lock_is_asked_by_torchs_server(
    folders: RunFolders, ranks: Ranks, collect: Callable[..., list[bool]]
) -> None:
    """Its channel does not answer; its dump is of this generation, and names it."""
    locked = ranks.rank(1, server={"dump_nccl_trace_json": content(3), "fr_trace_json": EMPTY})
    assert collect(ranks.rank(0, channel=content(4)), locked, ranks.rank(2, channel=content(4))) == [True] * 3
    found = judge_folder(folders.folder, 3, 3)
    assert found is not None
    assert (found.culprits, found.no_dump, found.confidence) == ((1,), (), 0.9)


def test_a_torch_without_nccl_has_the_other_recorder(
    folders: RunFolders, ranks: Ranks, collect: Callable[..., list[bool]]
) -> None:
    """It answers 404 for the first."""
    assert collect(ranks.rank(2, server={"fr_trace_json": content(4)})) == [True]
    assert json.loads(dump_path(folders.folder, 2).read_bytes())["opsd_generation"] == 3


def test_a_folder_has_one_dump_of_a_rank(folders: RunFolders, ranks: Ranks, collect: Callable[..., list[bool]]) -> None:
    """`opsd diagnose` refuses a folder with two; what torch wrote when a collective timed out is kept aside."""
    recorder = dump_path(folders.folder, 0).parent
    (recorder / "rank_0").write_bytes(b"torch's")
    collect(ranks.rank(0, channel=content(4)))
    assert sorted(path.name for path in recorder.iterdir()) == ["rank-0000.json", "short", "torch"]
    assert (recorder / "torch" / "rank_0").read_bytes() == b"torch's"


def test_the_judge_reads_the_short_dump(folders: RunFolders, ranks: Ranks, collect: Callable[..., list[bool]]) -> None:
    """A launcher of an earlier release writes none; there is an end to reading."""
    collect(*(ranks.rank(number, channel=content(3 + bool(number))) for number in range(3)))
    verdict = judge_folder(folders.folder, 3, 3)
    assert verdict is not None
    assert verdict.culprits == (0,)
    for rank in range(3):
        short_path(folders.folder, rank).rename(folders.folder / f"whole-{rank}")
    assert judge_folder(folders.folder, 3, 3) == verdict
    assert judge_folder(folders.folder, 3, 3, wait_s=-60.0) is None
    for rank in range(3):
        (folders.folder / f"whole-{rank}").rename(dump_path(folders.folder, rank))
    assert judge_folder(folders.folder, 3, 3) == verdict


def test_a_rank_that_has_recorded_nothing_is_not_waited_for(
    folders: RunFolders, ranks: Ranks, collect: Callable[..., list[bool]]
) -> None:
    """Its server says so."""
    began = time.monotonic()
    assert collect(ranks.rank(0, server={"fr_trace_json": EMPTY})) == [False]
    assert time.monotonic() - began < ANSWER_S
    assert not dump_path(folders.folder, 0).exists()


def test_a_rank_without_a_server_may_answer_late(
    folders: RunFolders, ranks: Ranks, collect: Callable[..., list[bool]]
) -> None:
    """Torch before 2.4 has none; the interpreter was held for a second."""
    late = threading.Timer(0.8, lambda: folders.dump(0).write_text(content(4)))
    late.start()
    assert collect(ranks.rank(0)) == [True]
    late.join()


def test_a_server_that_does_not_answer_is_not_waited_for_long(tmp_path: Path) -> None:
    """Of a rank that is stopped: the kernel accepts the connection."""
    path = tmp_path / "socket"
    with socketserver.UnixStreamServer(str(path), BaseHTTPRequestHandler):
        began = time.monotonic()
        assert ask_server(path, "fr_trace_json", 0.2) == b""
        assert time.monotonic() - began < 20
    assert ask_server(tmp_path / "none", "fr_trace_json", 0.2) == b""


@pytest.mark.parametrize(
    ("version", "older"),
    [
        ("2.4.1+cu121", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/run/rank_"}),
        ("2.7.0a0+git1234", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/run/rank_"}),
        ("2.9.1", {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/run/rank_"}),
        ("2.13.0+cpu", {}),
        ("", {}),
    ],
)
def test_releases_of_torch_know_the_variables_by_other_names(version: str, older: dict[str, str]) -> None:
    """Releases that know the new ones warn of the others."""
    new = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": "/run/rank_"}
    environ = dict(new)
    fit_environment(environ, version)
    assert environ == new | older
