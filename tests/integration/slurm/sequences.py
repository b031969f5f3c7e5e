"""Random faults, one after the other, in one run: whatever comes, the run ends as if nothing had happened.

A sequence is drawn from a seed: two to four faults, each some steps after the one before or right behind it, while the
run still recovers. There is one spare, so a second node lost has the job requeued without both.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from opsd import exitcodes
from opsd.ledger.ledger import read_ledger
from tests.integration.slurm.cluster import Cluster, wait_until
from tests.integration.slurm.training import Training, make_data
from tests.integration.slurm.trials import two_sides

ACTIVE, SPARES, MOST = 3, 1, 4
NODES = tuple(f"n{number}" for number in range(1, ACTIVE + SPARES + MOST + 1))
STEPS = 300
"""Enough for the last fault to come before the end where a step takes 0.05 s."""
SETTLED_STEPS = 8
"""At least so many steps lie between two faults, less than twice as many at most; or none."""
QUICK = {"data.sequence": 64, "checkpoint.every": 10}
OVERTAKING = 0.25
"""Share of faults that come while the run recovers from the one before."""
STOPPED_S, CUT_OFF_S, SLOW_S = 20.0, (0.5, 12.0), 4.0
SLOW_KBIT = 2000
PATIENCE_S = 60.0
LEDGER_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault ``kind`` at the node in ``place``, once ``after`` more steps are done; 0 is at once."""

    kind: str
    after: int
    place: int
    strength: float

    def __str__(self) -> str:
        return f"{self.kind} at {self.place} after {self.after} steps" if self.after else f"{self.kind} at once"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a sequence has ended; ``problems`` is empty if it did as it should. ``ledger_error`` is relative."""

    faults: tuple[Fault, ...]
    wall_s: float
    generations: int
    ledger_error: float
    problems: tuple[str, ...]


class Struck:
    """A run with the faults done to it; ``close`` ends those that last."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self._lasting: list[Popen[str]] = []

    def node(self, fault: Fault) -> str:
        """The node that the fault is for: one that runs ranks and has power."""
        living = [name for name in self.training.places if self.training.cluster.nodes[name].on]
        return living[fault.place % len(living)]

    def chaos(self, name: str, *argv: str) -> bool:
        """Have ``opsd chaos`` on the node ``name`` do something; False if that cannot be done just now."""
        done = self.training.cluster.nodes[name].run(*self._command(*argv), check=False)
        return done.returncode == exitcodes.OK

    def chaos_for_a_while(self, name: str, *argv: str) -> bool:
        """The same for a fault that lasts."""
        command = self.training.cluster.nodes[name].command(*self._command(*argv), "--json")
        process = Popen(command, text=True, start_new_session=True, stdout=PIPE, stderr=DEVNULL)
        self._lasting.append(process)
        assert process.stdout is not None
        return '"begun"' in process.stdout.readline()

    def _command(self, *argv: str) -> tuple[str, ...]:
        return (sys.executable, "-m", "opsd", "chaos", *argv, f"--run={self.training.name}", "--yes")

    def close(self) -> None:
        """Have what lasts undone."""
        self.training.cluster.heal()
        for process in self._lasting:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.communicate(timeout=PATIENCE_S)


def kill_rank(run: Struck, fault: Fault) -> None:
    """A rank dies."""
    _soon(lambda: run.chaos(run.node(fault), "kill-rank"))


def stop_rank(run: Struck, fault: Fault) -> None:
    """A rank stops, as in a hang."""
    _soon(lambda: run.chaos_for_a_while(run.node(fault), "stop-rank", f"--for={STOPPED_S:g}"))


def kill_node(run: Struck, fault: Fault) -> None:
    """A node with ranks loses power."""
    run.training.cluster.nodes[run.node(fault)].power_off()


def kill_head(run: Struck, fault: Fault) -> None:
    """The leader's node loses power."""
    host = run.training.cluster.nodes[run.training.leader]
    if host.on:
        host.power_off()


def cut_off(run: Struck, fault: Fault) -> None:
    """A node is cut off from all others for a while."""
    shortest, longest = CUT_OFF_S
    run.training.cluster.partition([run.node(fault)])
    time.sleep(shortest + (longest - shortest) * fault.strength)
    run.training.cluster.heal()


def swap(run: Struck, fault: Fault) -> None:
    """Somebody has a node replaced; without a spare that is refused, and the run goes on."""

    def asked() -> bool:
        node = run.node(fault)
        answer = run.training.ask(node, cmd="swap", node=node, reason="sequence")
        return bool(answer["ok"]) or "no spare" in answer["error"]

    _soon(asked)


def corrupt(run: Struck, fault: Fault) -> None:
    """The newest checkpoint is damaged, no node's memory holds another, and a rank dies."""
    places = [name for name in run.training.places if run.training.cluster.nodes[name].on]
    _soon(lambda: run.chaos(places[0], "corrupt-checkpoint", "--forget-memory", "--leave"))
    for name in places:
        memory = f"/dev/shm/opsd/{run.training.name}"
        run.training.cluster.nodes[name].run("find", memory, "-name", "rank-*.state*", "-delete", check=False)
    kill_rank(run, fault)


def slow(run: Struck, fault: Fault) -> None:
    """A node's network is slow for a while; it is not dead."""
    host = run.training.cluster.nodes[run.node(fault)]
    host.slow(SLOW_KBIT)
    time.sleep(SLOW_S * (1 + fault.strength))
    host.unslow()


KINDS: Mapping[str, Callable[[Struck, Fault], None]] = {
    "kill_rank": kill_rank,
    "stop_rank": stop_rank,
    "kill_node": kill_node,
    "kill_head": kill_head,
    "partition": cut_off,
    "planned_swap": swap,
    "corrupt_checkpoint": corrupt,
    "slow_network": slow,
}


def draw(seed: int, fewest: int = 2, most: int = MOST) -> tuple[Fault, ...]:
    """The sequence of ``seed``: kinds that differ. Pure."""
    random = Random(seed)
    kinds = random.sample(sorted(KINDS), random.randint(fewest, most))
    return tuple(
        Fault(
            kind,
            SETTLED_STEPS + random.randrange(SETTLED_STEPS) if number == 0 or random.random() > OVERTAKING else 0,
            random.randrange(ACTIVE),
            random.random(),
        )
        for number, kind in enumerate(kinds)
    )


def undisturbed(cluster: Cluster, data: Path, steps: int) -> dict[int, float]:
    """The loss of each step of a run that nothing happens to."""
    training = Training(cluster, data, "undisturbed", active=ACTIVE, spares=0, steps=steps, settings=QUICK)
    training.submit()
    if training.finish() != exitcodes.OK:
        raise RuntimeError(f"the undisturbed run has failed; {training.report()}")
    cluster.wait_idle()
    return training.losses()


def disturbed(cluster: Cluster, data: Path, name: str, steps: int) -> Training:
    """The same run, with a spare."""
    return Training(cluster, data, name, active=ACTIVE, spares=SPARES, steps=steps, settings=QUICK)


def play(cluster: Cluster, training: Training, faults: tuple[Fault, ...], losses: Mapping[int, float]) -> Outcome:
    """Do ``faults`` to a run of as many steps as ``losses`` has, and look how it ends. All nodes are idle after it."""
    run = Struck(training)
    job = training.submit()
    began = ended = time.time()
    problems: list[str] = []
    try:
        training.until(lambda: training.events("generation_started"), "the start")
        began = time.time()
        training.until_steady()
        for fault in faults:
            _wait_for_step(training, training.step + fault.after)
            KINDS[fault.kind](run, fault)
        training.until(lambda: _ended(training), "the end of the run", 4 * PATIENCE_S)
        ended = time.time()
        wait_until(lambda: _state(cluster, job) in ("", "COMPLETING"), "the job has ended with the run", PATIENCE_S)
        problems += _differences(training, losses)
    except (TimeoutError, RuntimeError) as error:
        problems.append(str(error))
    finally:
        run.close()
        cluster.restore()
    wall_s = ended - began
    off = abs(read_ledger(training.folder / "run").wall_s - wall_s) / wall_s if wall_s > 0 else 1.0
    if off > LEDGER_SHARE and not problems:
        problems.append(f"the ledger is off by {off:.1%} of {wall_s:.2f} s")
    generations = len(training.events("generation_started"))
    return Outcome(faults, wall_s, generations, off, tuple(problems))


def _wait_for_step(training: Training, step: int) -> None:
    training.until(lambda: training.step >= step, f"step {step}", 2 * PATIENCE_S)


def _ended(training: Training) -> bool:
    """True once a launcher has ended the run for good, and not for a requeue."""
    finished = training.events("finished")
    return bool(finished) and finished[-1]["exit_code"] != exitcodes.REQUEUE


def _state(cluster: Cluster, job: int) -> str:
    return cluster.controller.run("squeue", "-h", f"--jobs={job}", "--format=%T", check=False).stdout.strip()


def _differences(training: Training, losses: Mapping[int, float]) -> list[str]:
    """What is not as in the run that nothing happened to, each step that was done again included."""
    found = []
    last = training.events("finished")[-1]
    if last["exit_code"] != exitcodes.OK:
        found.append(f"exit code {last['exit_code']}: {last['reason']}")
    if missing := sorted(set(losses) - set(training.losses())):
        found.append(f"{len(missing)} steps are missing, the first is {missing[0]}")
    wrong = [line for line in training.metrics() if line["loss"] != losses.get(line["step"])]
    if wrong:
        found.append(f"{len(wrong)} losses differ, the first in step {wrong[0]['step']}: {_where(wrong[0])}")
    return [*found, *filter(None, [two_sides(training)])]


def _where(line: Mapping[str, Any]) -> str:
    return f"{line['loss']} in generation {line['generation']}"


def _soon(attempt: Callable[[], bool]) -> None:
    wait_until(attempt, "the fault can be caused", PATIENCE_S)


def run(seeds: Iterable[int], note: Callable[[str], None], steps: int = STEPS) -> dict[int, Outcome]:
    """The sequences of ``seeds``, one after the other, in runs of so many ``steps``.

    Raises RuntimeError if the undisturbed run fails.
    """
    found: dict[int, Outcome] = {}
    with Cluster(NODES) as cluster:
        data = make_data(cluster.shared)
        losses = undisturbed(cluster, data, steps)
        for seed in seeds:
            training = disturbed(cluster, data, f"sequence-{seed}", steps)
            found[seed] = outcome = play(cluster, training, draw(seed), losses)
            ended = "; ".join(outcome.problems) or f"well after {outcome.wall_s:.0f} s"
            note(f"{seed}: {', '.join(map(str, outcome.faults))}: ended {ended}")
    return found
