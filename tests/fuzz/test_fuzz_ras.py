"""Whatever listens on the port of NCCL's RAS: any user of the node can."""

from __future__ import annotations

import time
from contextlib import suppress

from opsd.agent.web import api
from opsd.collectors.lib.nccl.ras import MAX_RANKS, RasError, parse_status
from tests.fakes.fuzzing import AMOUNTS, changed, encoded, fuzz, json_values, objects
from tests.fakes.ras import GREETING, missing_rank, ras_json, ras_rank, ras_text

JSON = ras_json([ras_rank(0, {"AllReduce": 5}), ras_rank(1, {"AllReduce": 6}, async_error=6)], [missing_rank(2)])
TEXT = ras_text(
    "#0-0 (1c0f) INCOMPLETE\n  Missing 1 rank\n  Rank 3 -- GPU 3 managed by process 77 on node n7\n",
    "#0-0 (1c0f) MISMATCH\n  Communicator ranks have different collective operation counts\n"
    "  29 ranks have launched up to operation 6\n"
    "  Rank 3 -- GPU 3 managed by process 77 on node n7 has launched up to operation 5\n",
)
SEEDS: tuple[bytes, ...] = (
    (GREETING + "[" * 100_000).encode(),
    (GREETING + '{"nccl_version": "x", "communicators": [{"hash": 1, "ranks": [], "missing_ranks": {}}]}').encode(),
    JSON.replace('"pid": 1000', '"pid": 1e999').encode(),
    JSON.replace("10.0.0.1", "\\ud800").encode(),
    TEXT.replace("77", "²7").encode(),
    TEXT.encode() + b"#" * 200_000,
)
COMMUNICATOR = {
    "hash": "0x8a1b", "size": 2, "ranks": [ras_rank(0, {}), ras_rank(1, {"AllReduce": 1})], "missing_ranks": [],
}  # fmt: skip


def status(communicator: object) -> bytes:
    return GREETING.encode() + encoded({"nccl_version": "2.28.9", "communicators": [communicator]})


@AMOUNTS
def test_no_answer_is_a_bug(amount: int) -> None:
    """It is a status whose parts are bounded and can be sent, or a sentence; and it takes no long."""

    def parse(answer: bytes) -> None:
        began = time.process_time()
        with suppress(RasError):
            for problem in parse_status(answer).problems:
                api.encode(problem.text).decode()
                assert len(problem.ranks) <= MAX_RANKS and all(len(rank.host) <= 64 for rank in problem.ranks)
                (problem.communicator + problem.text + "".join(rank.host for rank in problem.ranks)).encode()
        assert time.process_time() - began < 2.0

    answers = changed(JSON.encode(), TEXT.encode()) | objects(COMMUNICATOR).map(status) | json_values.map(status)
    fuzz(parse, answers, amount, SEEDS)
