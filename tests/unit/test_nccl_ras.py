"""What RAS says, in JSON and in text, and what it says when something goes wrong on the way."""

from __future__ import annotations

import os
import time

import pytest

from opsd.collectors.lib.nccl.ras import MAX_PROBLEMS, REQUEST, RasError, RasQuery, parse_status
from tests.fakes.ras import GREETING, FakeRas, missing_rank, ras_json, ras_rank, ras_text

OWN = frozenset({os.geteuid()})
AT_FIVE, AT_SIX = {"AllReduce": 5}, {"AllReduce": 6}


def ask(server: FakeRas, deadline_s: float = 30.0) -> bytes:
    """Poll as the collector does, only faster."""
    query = RasQuery(server.address, time.monotonic(), OWN, deadline_s)
    while (answer := query.poll(time.monotonic())) is None:
        time.sleep(0.01)
    return answer


def test_ranks_that_all_move_on_are_no_problem() -> None:
    """Equal counts, no errors, nobody missing."""
    status = parse_status(ras_json([ras_rank(0, AT_SIX), ras_rank(1, AT_SIX)]).encode())
    assert (status.nccl_version, status.communicators, status.problems) == ("2.28.9", 1, ())


def test_the_rank_that_has_launched_less_is_named() -> None:
    """With its host, process and GPU, since its number counts within the communicator only."""
    ranks = [ras_rank(number, AT_FIVE if number == 9 else AT_SIX) for number in range(16)]
    (problem,) = parse_status(ras_json(ranks).encode()).problems
    assert problem.kind == "mismatch"
    assert problem.text == "1 of 16 ranks are at AllReduce 5, others at up to 6"
    assert [(rank.rank, rank.host, rank.pid, rank.gpu) for rank in problem.ranks] == [(9, "10.0.0.2", 1009, 1)]


def test_asynchronous_errors_are_named() -> None:
    """A rank with an error, or in abort, is one; an operation in progress is none."""
    ranks = [ras_rank(0, {}, async_error=6), ras_rank(1, {}, abort_flag=True), ras_rank(2, {}, async_error=7)]
    (problem,) = parse_status(ras_json(ranks).encode()).problems
    assert (problem.kind, [rank.rank for rank in problem.ranks]) == ("error", [0, 1])


def test_missing_ranks_are_read_in_spite_of_the_missing_comma() -> None:
    """NCCL 2.28 prints invalid JSON exactly when ranks are missing."""
    answer = ras_json([ras_rank(0, AT_SIX)], [missing_rank(1), missing_rank(2)])
    assert '"nvml_dev": 0\n' in answer
    (problem,) = parse_status(answer.encode()).problems
    assert problem.kind == "incomplete"
    assert problem.text == "2 of 3 ranks do not answer"
    assert [rank.pid for rank in problem.ranks] == [1001, 1002]


def test_text_of_a_healthy_job() -> None:
    """NCCL before 2.28.7 refuses JSON and answers with text."""
    status = parse_status(ras_text().encode())
    assert (status.nccl_version, status.communicators, status.problems) == ("2.24.3", 5, ())


def test_text_names_the_few_that_lag() -> None:
    """A rank of its own line carries its count."""
    warning = """
#0-0 (a1b2c3d4e5f60718) MISMATCH
  Communicator ranks have different AllReduce operation counts
  31 ranks have launched up to operation 1000
  Rank 17 has launched up to operation 999 -- GPU 1 managed by process 4242 on node 10.0.0.3
"""
    (problem,) = parse_status(ras_text(warning=warning).encode()).problems
    assert (problem.kind, problem.communicator) == ("mismatch", "a1b2c3d4e5f60718")
    assert [(rank.rank, rank.host, rank.pid, rank.gpu) for rank in problem.ranks] == [(17, "10.0.0.3", 4242, 1)]
    assert "AllReduce" in problem.text


def test_text_does_not_blame_the_few_that_are_ahead() -> None:
    """RAS lists outliers; where these are ahead, the laggards are the many it does not list."""
    warning = """
#0-0 (a1b2) MISMATCH
  Communicator ranks have different AllReduce operation counts
  30 ranks have launched up to operation 999
  2 ranks have launched up to operation 1000
  Rank 0 -- GPU 0 managed by process 1 on node 10.0.0.1
  Rank 1 -- GPU 1 managed by process 2 on node 10.0.0.1
"""
    (problem,) = parse_status(ras_text(warning=warning).encode()).problems
    assert problem.ranks == ()


def test_text_of_errors_and_dead_processes() -> None:
    """Errors name ranks, dead processes name process and GPU; different CUDA and NVML numbers give the NVML one."""
    error = """
DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 77 on node 10.0.0.4 managing GPU 5

#0-0 (a1b2) ERROR
  Asynchronous error on 1 rank
  Rank 3 reported Remote process error -- GPU 0 (NVML 3) managed by process 5 on node 10.0.0.1
"""
    dead, erred = parse_status(ras_text(error=error).encode()).problems
    assert (dead.kind, dead.ranks[0].pid, dead.ranks[0].gpu) == ("dead", 77, 5)
    assert (erred.kind, erred.ranks[0].rank, erred.ranks[0].gpu) == ("error", 3, 3)


JSON_ANSWER = ras_json([ras_rank(0, AT_SIX), ras_rank(1, AT_SIX)], [missing_rank(2)]).encode()
TEXT_ANSWER = ras_text().encode()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        GREETING.encode(),
        *(JSON_ANSWER[:cut] for cut in range(20, len(JSON_ANSWER) - 4, 97)),
        *(TEXT_ANSWER[:cut] for cut in range(0, len(TEXT_ANSWER) - 20, 61)),
        GREETING.encode() + b'{"communicators": 7, "nccl_version": "2"}',
        GREETING.encode() + b'{"communicators": [' + b"[" * 100_000,
        GREETING.encode() + b"\xff\x00\x1b[2J",
        JSON_ANSWER.replace(b'"rank": 2', b'"rank": Infinity'),
        JSON_ANSWER.replace(b"10.0.0.9", b"\\ud800"),
    ],
)
def test_half_answers_and_garbage_are_refused(answer: bytes) -> None:
    """A server that closes mid-answer, another service on the port, hostile nesting: one sentence, never a status."""
    with pytest.raises(RasError) as caught:
        parse_status(answer)
    assert "\n" not in str(caught.value)


def test_a_question_is_asked_in_one_go() -> None:
    """The request names protocol, timeout and format, and asks for the status; the whole answer comes back."""
    with FakeRas(JSON_ANSWER) as server:
        assert ask(server) == JSON_ANSWER
        assert server.requests == [REQUEST]


def test_a_server_that_never_finishes_is_given_up() -> None:
    """Polling never waits; after the deadline the question is over."""
    with FakeRas(GREETING, hold=True) as server, pytest.raises(RasError, match="has not answered in time"):
        ask(server, deadline_s=0.3)


def test_nobody_listens() -> None:
    """Without NCCL the connection is refused, which is an answer: nobody has to wait for the deadline."""
    with FakeRas("") as server:
        address = server.address
    now = time.monotonic()
    query = RasQuery(address, now, OWN)
    with pytest.raises(RasError, match="does not answer: Connection refused"):
        while query.poll(now) is None:
            time.sleep(0.01)


def test_another_users_ras_is_not_asked() -> None:
    """Nothing is sent before it is known whose process has accepted."""
    with FakeRas(JSON_ANSWER) as server:
        query = RasQuery(server.address, time.monotonic(), frozenset({os.geteuid() + 1}))
        with pytest.raises(RasError, match=f"belongs to user {os.geteuid()}, who leads no run here"):
            while query.poll(time.monotonic()) is None:
                time.sleep(0.01)
    assert server.requests in ([], [b""])


def test_problems_without_number_are_not_all_told() -> None:
    """Each is an event, and all of them are remembered until the next answer."""
    head = "#0-0 (abc) MISMATCH\n  1 communicators\n"
    answer = ras_text().encode() + f"\n{head}".encode() * 30_000
    assert len(parse_status(answer).problems) == MAX_PROBLEMS
