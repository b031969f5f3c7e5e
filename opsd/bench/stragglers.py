"""What it costs the leader of a run to compare the step times of thousands of ranks."""

from __future__ import annotations

import json
import random
import time

from opsd.launch.run.messages import CODEC, Progress, StepTimes
from opsd.launch.run.slow_ranks import LONG, LONG_EVERY, LOOK_S, PHASES, SAMPLE_S, decode, encode, judge_windows
from opsd.stragglers.trace import Place, Trace

RANKS, PER_NODE = 4096, 8
TOLD_S = 2.0
"""How often a launcher tells its times."""
ROUNDS = 5


def run() -> dict[str, float | int]:
    """Bytes a second and processor time of the leader, for the shortest samples: ``SAMPLE_S`` apart."""
    draw = random.Random(1)
    steps = round(TOLD_S / SAMPLE_S)
    messages = [_message(node, steps, draw) for node in range(RANKS // PER_NODE)]
    began = time.process_time()
    for message in messages:
        times = CODEC.decode(json.loads(message)).times
        decode(times.seconds, len(times.ranks) * len(times.steps) * len(PHASES))
    reading_s = time.process_time() - began
    trace = _trace(draw)
    usual_s, long_s = _judging_s(trace, long=False), _judging_s(trace, long=True)
    mean_s = ((LONG_EVERY - 1) * usual_s + long_s) / LONG_EVERY
    size = sum(map(len, messages))
    return {
        "ranks": RANKS,
        "launchers": len(messages),
        "ours_message_bytes": size // len(messages),
        "ours_leader_bytes_per_s": size / TOLD_S,
        "ours_reading_ms_per_s": 1000 * reading_s / TOLD_S,
        "ours_judging_ms": 1000 * usual_s,
        "ours_judging_long_ms": 1000 * long_s,
        "ours_leader_cpu_share": reading_s / TOLD_S + mean_s / LOOK_S,
    }


def _judging_s(trace: Trace, *, long: bool) -> float:
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        found = judge_windows(trace, long=long)
        rounds.append(time.process_time() - began)
        assert any(verdict.culprits == (5,) for verdict in found)
    return min(rounds)


def _message(node: int, steps: int, draw: random.Random) -> bytes:
    ranks = tuple(range(PER_NODE * node, PER_NODE * (node + 1)))
    seconds = [draw.uniform(0.1, 1.0) for _ in range(len(ranks) * steps * len(PHASES))]
    places = tuple(number for rank in ranks for number in (rank // 8, 0, rank % 8, 0))
    times = StepTimes(ranks, tuple(range(1000, 1000 + steps)), tuple(range(PER_NODE)), encode(seconds), places)
    return json.dumps(CODEC.encode(Progress(1, 1000, 900, times)), separators=(",", ":")).encode()


def _trace(draw: random.Random) -> Trace:
    """As many steps as are judged; rank 5 is slow."""
    steps = LONG
    shares = dict(zip(PHASES, (0.3, 0.6, 0.05, 0.01, 0.0, 1.0), strict=True))
    seconds = {
        phase: {
            rank: [share * draw.lognormvariate(0, 0.02) * (1.5 if rank == 5 else 1.0) for _ in range(steps)]
            for rank in range(RANKS)
        }
        for phase, share in shares.items()
    }
    places = {rank: Place(f"n{rank // PER_NODE}", rank % PER_NODE, dp=rank) for rank in range(RANKS)}
    return Trace(places, range(steps), seconds)
