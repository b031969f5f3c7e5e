"""Addresses of other launchers: asked for once, kept, and still used while the name service does not answer."""

from __future__ import annotations

import errno

from opsd.launch.io.handshake import FRESH_S, RETRY_S, AddressBook
from opsd.simulate.cluster import VirtualLoop


class Names:
    """A name service that may be away."""

    def __init__(self) -> None:
        self.known = {"n1": "192.0.2.1"}
        self.asked: list[str] = []

    def __call__(self, host: str) -> str:
        self.asked.append(host)
        if host not in self.known:
            raise OSError(errno.ENOENT, "Name or service not known")
        return self.known[host]


class Loop(VirtualLoop):
    """As production's, whose threads raise nothing but hand over OSErrors."""

    def run_in_thread(self, work, done, *, key=""):  # type: ignore[no-untyped-def]
        try:
            outcome = work()
        except OSError as error:
            outcome = error
        self.later(0.1, lambda: done(outcome))
        return True


class World:
    def __init__(self) -> None:
        self.loop, self.names = Loop(), Names()
        self.found: list[str | None] = []
        self.failed: list[str] = []
        self.book = AddressBook(self.loop, lambda host, error: self.failed.append(host), self.names)

    def find(self, host: str) -> None:
        self.book.find(host, self.found.append)

    def pass_time(self, seconds: float) -> None:
        self.loop.run(self.loop.time() + seconds)


def test_an_address_needs_no_question() -> None:
    """Of either family."""
    world = World()
    world.find("192.0.2.9")
    world.find("2001:db8::9")
    assert (world.found, world.names.asked) == (["192.0.2.9", "2001:db8::9"], [])


def test_a_name_is_asked_for_once() -> None:
    """Also by those who want it before the answer; later ones have it at once."""
    world = World()
    for _ in range(3):
        world.find("n1")
    assert world.found == []
    world.pass_time(1.0)
    world.find("n1")
    assert (world.found, world.names.asked) == (["192.0.2.1"] * 4, ["n1"])


def test_an_old_answer_serves_while_a_new_one_is_fetched() -> None:
    """A name service that is away takes nothing from those who knew the address; a node that has moved is found."""
    world = World()
    world.find("n1")
    world.pass_time(FRESH_S + 1)
    world.names.known.clear()
    world.find("n1")
    world.pass_time(FRESH_S + 1)
    world.names.known["n1"] = "192.0.2.7"
    world.find("n1")
    world.pass_time(1.0)
    world.find("n1")
    assert (world.found, world.failed) == (["192.0.2.1"] * 3 + ["192.0.2.7"], [])


def test_a_name_without_an_address_is_told_and_asked_for_now_and_then() -> None:
    """Not with each message; once it has an address that is found."""
    world = World()
    world.find("n2")
    world.pass_time(RETRY_S / 2)
    world.find("n2")
    assert (world.found, world.failed, world.names.asked) == ([None, None], ["n2"], ["n2"])
    world.names.known["n2"] = "192.0.2.2"
    world.pass_time(RETRY_S)
    world.find("n2")
    world.pass_time(1.0)
    assert world.found[-1] == "192.0.2.2"
