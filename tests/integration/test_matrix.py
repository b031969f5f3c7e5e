"""Whatever happens to which launchers of a run, in networks of their own: one generation goes on, and only one.

The checks read the files that ranks and launchers leave, and know nothing of how launchers decide.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakes.namespaces import NoNamespacesError
from tests.fakes.partition import NodeNetwork, PartitionedNodes, check_commits, check_steps

HOLD_S = 6.0
"""How long a fault lasts: three times as long as a silent node is waited for."""
FLAPS, FLAP_S = 3, 3.0
SETTLE_S = 90.0


def stop(run: PartitionedNodes, names: list[str]) -> None:
    """Stop launchers and let them go on; their ranks step meanwhile."""
    run.stop_launchers(names)
    time.sleep(HOLD_S)
    run.continue_launchers(names)


def kill(run: PartitionedNodes, names: list[str]) -> None:
    """Kill launchers and start them again, with nothing that they could remember."""
    run.kill_launchers(names)
    time.sleep(HOLD_S / 2)
    for name in names:
        run.start(name)


def cut(run: PartitionedNodes, names: list[str]) -> None:
    """Part them from the others, and from these alone."""
    run.wires.part(run.numbers(names))
    time.sleep(HOLD_S)
    run.wires.heal()


def mute(run: PartitionedNodes, names: list[str]) -> None:
    """They hear the others, who do not hear them."""
    run.wires.mute(run.numbers(names))
    time.sleep(HOLD_S)
    run.wires.heal()


def deafen(run: PartitionedNodes, names: list[str]) -> None:
    """They do not hear the others, who hear them."""
    run.wires.deafen(run.numbers(names))
    time.sleep(HOLD_S)
    run.wires.heal()


def flap(run: PartitionedNodes, names: list[str]) -> None:
    """The network comes and goes."""
    for _ in range(FLAPS):
        run.wires.part(run.numbers(names))
        time.sleep(FLAP_S)
        run.wires.heal()
        time.sleep(FLAP_S)


FAULTS = (stop, kill, cut, mute, deafen, flap)
QUICK = {("stop", "leader", 2), ("kill", "leader", 3), ("cut", "tie", 2)}


def struck(run: PartitionedNodes, who: str) -> list[str]:
    """Whom a fault hits: the leader, another one, or half of those that run, the leader among them."""
    leader = run.leader
    others = [name for name in run.names if name != leader and run.processes[name].poll() is None]
    if who == "leader":
        return [leader]
    if who == "follower":
        return others[:1]
    return [leader, *others[: (len(others) + 1) // 2 - 1]]


def cells() -> Iterator[object]:
    for size in (2, 3, 4, 5):
        for who in ("leader", "follower", "tie"):
            for fault in FAULTS:
                quick = (fault.__name__, who, size) in QUICK
                mark = pytest.mark.slow if quick else pytest.mark.waiting
                yield pytest.param(size, who, fault, marks=mark, id=f"{fault.__name__}-{who}-{size}")


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Callable[..., PartitionedNodes]]:
    """Starts a run of so many launchers, which are ended whatever happens; a bystander is left alone by all of it."""
    with ExitStack() as stack:
        bystander = subprocess.Popen(["sleep", "600"])
        stack.callback(bystander.wait)
        stack.callback(bystander.kill)

        def start(size: int, ipv6: bool = False) -> PartitionedNodes:
            try:
                wires = stack.enter_context(NodeNetwork(size))
            except NoNamespacesError as error:
                pytest.skip(str(error))
            return stack.enter_context(PartitionedNodes(tmp_path, wires, ipv6=ipv6))

        yield start
        assert bystander.poll() is None


def begins(run: PartitionedNodes, nodes: int) -> None:
    """Wait until one generation steps on so many nodes."""
    run.until(lambda: run.whole(time.time() - 0.5, nodes), SETTLE_S)


def goes_on_with(run: PartitionedNodes, ranks: int) -> None:
    """Wait for another generation of so many ranks; those of a launcher that is stopped may step on."""
    since = time.time()
    run.until(lambda: any(trace.steps[0] > since and trace.world == ranks for trace in run.traces()), SETTLE_S)


def settles(run: PartitionedNodes, healed_at: float) -> None:
    """Wait until one generation has stepped alone for a while, and check all that happened on the way."""
    began = time.time()

    def alone() -> bool:
        nonlocal began
        if not run.whole(time.time() - 0.5):
            began = time.time()
        return time.time() - began > 4.0

    run.until(alone, SETTLE_S)
    traces = run.traces()
    check_steps(traces, healed_at)
    check_commits(traces, run.claims())
    assert {name: process.poll() for name, process in run.processes.items()} == dict.fromkeys(run.names)
    newest = max(traces, key=lambda trace: trace.generation)
    run.until(lambda: len(run.ranks_alive()) == newest.world, 10.0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("size", "who", "fault"), list(cells()))
def test_one_generation_goes_on(
    apart: Callable[..., PartitionedNodes], size: int, who: str, fault: Callable[[PartitionedNodes, list[str]], None]
) -> None:
    """All launchers live on, no rank of another generation is left, and none committed that had been passed over."""
    run = apart(size)
    begins(run, size)
    gone = [name for name in run.names if name != run.leader][:1] if who == "tie" and size % 2 else []
    if gone:
        run.kill(*gone)
        begins(run, size - 1)
    fault(run, struck(run, who))
    for name in gone:
        run.start(name)
    settles(run, healed_at=time.time())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_over_ipv6(apart: Callable[..., PartitionedNodes]) -> None:
    """Launchers and ranks meet there as well, and after a loss."""
    run = apart(2, ipv6=True)
    begins(run, 2)
    kill(run, [run.leader])
    settles(run, healed_at=time.time())


@pytest.mark.waiting
@pytest.mark.timeout(300)
@pytest.mark.parametrize("with_ranks", [False, True])
def test_a_tie_whose_loser_wakes_beside_a_launcher_that_has_forgotten(
    apart: Callable[..., PartitionedNodes], with_ranks: bool
) -> None:
    """Of three, one is frozen and then one killed, so that the last goes on alone; it is frozen, and they return.

    The second votes as if nothing had been: neither it nor the one that slept may go on beside the third for good.
    """
    run = apart(3)
    freeze = run.freeze if with_ranks else lambda name: run.stop_launchers([name])
    begins(run, 3)
    leader = run.leader
    third, second = (name for name in run.names if name != leader)
    freeze(leader)
    goes_on_with(run, 2)
    run.kill(third)
    goes_on_with(run, 1)
    freeze(second)
    run.thaw(leader)
    run.start(third)
    goes_on_with(run, 2)
    run.thaw(second)
    settles(run, healed_at=time.time())
