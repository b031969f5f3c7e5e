"""The simulated network and shared folder: as bad as they are told to be, and never worse."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from opsd.checkpoints.claims import Claim, ClaimError
from tests.fakes.network_weather import Network, Weather
from tests.fakes.shared_folder import SharedFolder, Trouble
from tests.fakes.virtual_time import World

SEEDS = range(30)


@pytest.fixture
def world() -> World:
    world = World()
    for name in ("n1", "n2", "n3"):
        world.start(name)
    return world


def claim(number: int, launcher: str = "n1-a") -> Claim:
    return Claim(number, "start", launcher)


# -- nodes -----------------------------------------------------------------------------------------------------------


def test_a_paused_node_gets_everything_when_it_wakes(world: World) -> None:
    """In the order in which it came, its timers included."""
    done: list[str] = []
    world.after("n1", 2.0, lambda: done.append("timer"))
    world.pause("n1")
    world.later(1.0, lambda: world.tell("n1", lambda: done.append("message")))
    world.run(5.0)
    assert done == []
    world.wake("n1")
    world.run(0.0)
    assert done == ["message", "timer"]


def test_a_node_that_was_started_again_hears_nothing_of_its_former_life(world: World) -> None:
    """Neither its timers nor what waited for it."""
    done: list[str] = []
    world.after("n1", 1.0, lambda: done.append("timer"))
    world.pause("n1")
    world.tell("n1", lambda: done.append("message"))
    world.kill("n1")
    assert (world.life("n1"), world.start("n1"), world.life("n1")) == (0, 2, 2)
    world.run(5.0)
    assert done == []


# -- network ---------------------------------------------------------------------------------------------------------


class Arrived(list[tuple[str, str, Any]]):
    """What a network has delivered."""

    def __call__(self, source: str, target: str, message: Any) -> None:
        self.append((source, target, message))


@pytest.fixture
def arrived() -> Arrived:
    return Arrived()


@pytest.fixture
def network(world: World, arrived: Arrived) -> Network:
    return Network(world, random.Random(1), arrived)


def send_many(network: Network, world: World, count: int = 200) -> None:
    for number in range(count):
        network.send("n1", "n2", number)
        world.run(0.0001)
    world.run(1.0)


def test_messages_arrive_in_order_unless_they_may_overtake(network: Network, world: World, arrived: Arrived) -> None:
    """As over one TCP connection, or over several."""
    send_many(network, world)
    assert [message for *_, message in arrived] == list(range(200))
    network.weather = Weather(overtaking=1.0)
    arrived.clear()
    send_many(network, world)
    assert [message for *_, message in arrived] != list(range(200)) == sorted(message for *_, message in arrived)


def test_messages_are_lost_and_doubled(network: Network, world: World, arrived: Arrived) -> None:
    """About as many as the weather says."""
    network.weather = Weather(lost=0.5)
    send_many(network, world)
    assert 50 < len(arrived) < 150
    network.weather = Weather(doubled=0.5)
    arrived.clear()
    send_many(network, world)
    assert 250 < len(arrived) < 350


def test_a_cut_has_a_direction(network: Network, world: World, arrived: Arrived) -> None:
    """What is under way when it comes is lost as well."""
    network.send("n1", "n2", "under way")
    network.cut("n1", "n2")
    network.send("n1", "n2", "later")
    network.send("n2", "n1", "back")
    world.run(1.0)
    assert arrived == [("n2", "n1", "back")]
    network.mend("n1", "n2")
    network.send("n1", "n2", "mended")
    world.run(1.0)
    assert arrived[1:] == [("n1", "n2", "mended")]


def test_messages_pass_only_within_a_side(network: Network, world: World, arrived: Arrived) -> None:
    """Until the network is whole again."""
    network.part(("n1", "n3"))
    for target in ("n2", "n3"):
        network.send("n1", target, "parted")
    world.run(1.0)
    assert arrived == [("n1", "n3", "parted")]
    network.heal()
    network.send("n1", "n2", "healed")
    world.run(1.0)
    assert arrived[1:] == [("n1", "n2", "healed")]


def test_a_paused_node_gets_its_messages_later_and_a_dead_one_never(
    network: Network, world: World, arrived: Arrived
) -> None:
    """Not even if it is started again while they are under way."""
    world.pause("n2")
    for target in ("n2", "n3"):
        network.send("n1", target, "hello")
    world.kill("n3")
    world.start("n3")
    world.run(1.0)
    assert arrived == []
    world.wake("n2")
    world.run(0.0)
    assert arrived == [("n1", "n2", "hello")]


# -- the shared folder -----------------------------------------------------------------------------------------------


class Asked:
    """Operations on a folder and their answers, by name."""

    def __init__(self, world: World, seed: int, trouble: Trouble | None = None) -> None:
        self.world = world
        self.folder = SharedFolder(world, random.Random(seed))
        self.folder.trouble = trouble or Trouble()
        self.answers: dict[str, Any] = {}

    def done(self, name: str) -> Callable[[Any], None]:
        return lambda answer: self.answers.update({name: answer})

    def wait(self, ask: Callable[[Callable[[Any], None]], None]) -> Any:
        ask(self.done("waited"))
        self.world.run(1.0)
        return self.answers.pop("waited")

    def newest(self, client: str) -> Claim | None:
        found: Claim | None = self.wait(lambda done: self.folder.newest(client, done))
        return found


@pytest.mark.parametrize("seed", SEEDS)
def test_a_number_has_one_owner(world: World, seed: int) -> None:
    """Whoever is first; a repeated claim of one's own holds, an overtaken one does not."""
    asked = Asked(world, seed, Trouble(stale_s=60.0))
    for name in ("n1", "n2", "n3"):
        asked.folder.create(name, claim(1, name), asked.done(name))
    world.run(1.0)
    (owner,) = [name for name, mine in asked.answers.items() if mine]
    assert asked.folder.history[0][1].launcher == owner
    assert asked.wait(lambda done: asked.folder.create(owner, claim(1, owner), done)) is True
    assert asked.wait(lambda done: asked.folder.create("n3", claim(2, "n3"), done)) is True
    assert asked.wait(lambda done: asked.folder.create(owner, claim(1, owner), done)) is False


def test_what_is_read_may_be_a_minute_old_and_never_older(world: World) -> None:
    """It never goes back either, and who has changed the folder sees it as it was then or is now."""
    asked = Asked(world, 3, Trouble(stale_s=60.0))
    seen: list[int] = []
    for number in range(1, 60):
        assert asked.wait(lambda done, number=number: asked.folder.create("n1", claim(number), done))
        own = asked.newest("n1")
        assert own is not None and own.number == number
        found = asked.newest("n2")
        seen.append(found.number if found else 0)
        world.run(4.0)
    assert seen == sorted(seen)
    assert max(behind := [number - each for number, each in enumerate(seen, 1)]) > 1
    assert max(behind) <= 60 / 6 + 1
    asked.folder.heal()
    newest = asked.newest("n2")
    assert newest is not None and newest.number == 59


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stall_delays_everything_and_loses_nothing(world: World, seed: int) -> None:
    """What was asked for happens once it is over, in any order."""
    asked = Asked(world, seed)
    asked.folder.stall()
    for name in ("n1", "n2", "n3"):
        asked.folder.create(name, claim(1, name), asked.done(name))
    world.run(100.0)
    assert asked.answers == {} and asked.folder.history == []
    asked.folder.go_on()
    world.run(1.0)
    assert sorted(asked.answers.values()) == [False, False, True]


def test_a_stalled_client_does_not_hinder_the_others(world: World) -> None:
    """Its own operations wait."""
    asked = Asked(world, 1)
    asked.folder.stall("n1")
    for name in ("n1", "n2"):
        asked.folder.renew(name, 3, 7, asked.done(name))
    world.run(10.0)
    assert asked.answers == {"n2": None}
    asked.folder.go_on("n1")
    world.run(1.0)
    assert asked.answers == {"n1": None, "n2": None}


def test_the_lease_is_what_was_written_last(world: World) -> None:
    """(0, 0) before anybody has."""
    asked = Asked(world, 1)
    assert asked.wait(lambda done: asked.folder.lease("n2", done)) == (0, 0)
    for beat in (5, 6):
        asked.wait(lambda done, beat=beat: asked.folder.renew("n1", 1, beat, done))
    assert asked.wait(lambda done: asked.folder.lease("n2", done)) == (1, 6)


@pytest.mark.parametrize(("trouble", "made"), [(Trouble(failed=1.0), 0), (Trouble(answer_lost=1.0), 1)])
def test_an_error_does_not_say_whether_it_has_happened(world: World, trouble: Trouble, made: int) -> None:
    """As with a file server whose answer is lost."""
    asked = Asked(world, 1, trouble)
    assert isinstance(asked.wait(lambda done: asked.folder.create("n1", claim(1), done)), ClaimError)
    assert len(asked.folder.history) == made


def test_what_the_dead_have_asked_for_happens_and_nobody_is_told(world: World) -> None:
    """A request may be on its way to the server when its client dies."""
    asked = Asked(world, 1)
    asked.folder.create("n1", claim(1), asked.done("n1"))
    world.kill("n1")
    world.start("n1")
    world.run(1.0)
    assert len(asked.folder.history) == 1
    assert asked.answers == {}
