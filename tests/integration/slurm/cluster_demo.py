"""``make cluster-demo``: a real Slurm cluster on this machine trains a model, loses its leading node, and goes on."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.integration.slurm.cluster import Cluster, missing
from tests.integration.slurm.training import Training, make_data

NODES = ("n1", "n2", "n3", "n4")
STEPS = 200
_SHOWN = ("lost", "silent_s", "joined", "nodes", "spares", "step", "lost_steps", "recovered_s", "tier", "reason")


class Show:
    """Prints what happens in a run as it happens."""

    def __init__(self, console: Console, training: Training, began: float) -> None:
        self._console, self._training, self._began = console, training, began
        self._seen = 0

    def follow(self, done: str, count: int = 1, timeout_s: float = 300.0) -> None:
        """Print events until there are ``count`` of the kind ``done``. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while True:
            events = self._training.events()
            for event in events[self._seen :]:
                self._print(event)
            self._seen = len(events)
            if sum(event["event"] == done for event in events) >= count:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {done} within {timeout_s:g} s; {self._training.report()}")
            time.sleep(0.1)

    def _print(self, event: dict[str, Any]) -> None:
        between = event["event"] == "checkpoint_committed" and event["step"] % 100
        if between or event["event"] == "data_mixture":
            return
        fields = ", ".join(f"{key} {_text(event[key])}" for key in _SHOWN if event.get(key) not in (None, []))
        self.say(f"{event['event']:<20} {fields}")

    def say(self, text: str) -> None:
        """Print one line with the time since the beginning."""
        self._console.print(f"{time.time() - self._began:6.1f} s  {text}", markup=False, highlight=False)


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def play(console: Console) -> bool:
    """The demo; True if the run ended with the losses of one that nothing happened to."""
    began = time.time()
    with console.status("starting a Slurm cluster of four nodes, making token shards"), Cluster(NODES) as cluster:
        data = make_data(cluster.shared)
        console.print(f"cluster   {', '.join(cluster.states())}: slurmctld and slurmd in namespaces of their own")
        quiet = Training(cluster, data, "undisturbed", steps=STEPS)
        show = Show(console, quiet, began)
        show.say(f"job {quiet.submit()}: {STEPS} steps on three nodes, for comparison")
        show.follow("finished")
        cluster.wait_idle()

        training = Training(cluster, data, "disturbed", steps=STEPS)
        show = Show(console, training, began)
        show.say(f"job {training.submit()}: the same on three nodes and a spare")
        show.follow("checkpoint_committed", 2)
        training.until_steady()
        leader, failed_at = training.leader, training.step
        cluster.nodes[leader].power_off()
        show.say(f"POWER LOSS           {leader}: the leader of the run, and the batch host of its Slurm job")
        show.follow("resumed")
        before = training.events("generation_started")[0]["nodes"]
        show.say(f"{'nodes':<20} {' '.join(before)} -> {' '.join(training.places)}")
        show.follow("finished")
        return _verdict(console, quiet, training, leader, failed_at)


def _verdict(console: Console, quiet: Training, training: Training, leader: str, failed_at: int) -> bool:
    resumed, generation = training.events("resumed")[0], training.events("resumed")[0]["generation"]
    lost = training.events("node_lost")[0]
    equal = training.losses() == quiet.losses()
    table = Table(title="the loss of the leading node", title_justify="left")
    for column in ("node", "at step", "noticed after", "last step to next", "lost steps", "state from", "losses"):
        table.add_column(column)
    loaded = [event["tier"] for event in training.events("checkpoint_loaded") if event["generation"] == generation]
    table.add_row(
        leader,
        str(failed_at),
        f"{lost['silent_s']:.1f} s",
        f"{training.gap_s(generation):.1f} s",
        str(resumed["lost_steps"]),
        ", ".join(loaded) or "the beginning",
        "equal to the last bit" if equal else "differ",
    )
    console.print(table)
    return equal and training.events("finished")[-1]["exit_code"] == 0


def main() -> None:
    """Exit with 0 if the run went on as if nothing had happened."""
    console = Console()
    if reason := missing():
        console.print(f"no Slurm cluster can be made: {reason}")
        sys.exit(1)
    sys.exit(0 if play(console) else 1)


if __name__ == "__main__":
    main()
