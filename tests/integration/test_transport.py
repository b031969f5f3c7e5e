"""Launchers that exchange messages over real connections."""

from __future__ import annotations

import errno
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from opsd.launch.io.connection import Connection
from opsd.launch.io.protocol import Member
from opsd.ports import free_port
from tests.fakes.transport import NET, Launcher, Launchers


def test_messages_arrive_in_order(launchers: Launchers, pair: tuple[Launcher, Launcher]) -> None:
    """Both ways, also if both call at once."""
    one, two = launchers.start(3), launchers.start(4)
    for number in range(200):
        one.send(two, number)
        two.send(one, number)
    launchers.until(lambda: len(one.heard) == len(two.heard) == 200)
    assert two.heard == [("n3", number) for number in range(200)]
    assert one.heard == [("n4", number) for number in range(200)]


def test_over_ipv6() -> None:
    """As over IPv4."""
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    launchers = Launchers(lambda number: "::1")
    one = launchers.start(1)
    launchers.port = free_port()
    two = launchers.start(2)
    one.send(two)
    two.send(one)
    launchers.until(lambda: one.heard == [("n2", 1)] and two.heard == [("n1", 1)])
    launchers.close()


def test_names_are_looked_up_when_they_are_called(launchers: Launchers) -> None:
    """In threads: a name service that takes its time for one holds up nobody else, and what was sent arrives after."""
    answers = {"n2": threading.Event(), "n3": threading.Event()}

    def lookup(host: str) -> str:
        answers[host].wait(20.0)
        return f"127.{NET}.2.{host[1:]}"

    one = launchers.start(1, lookup=lookup)
    two, three = launchers.start(2), launchers.start(3)
    for other in (two, three):
        one.transport.send(Member(other.member.name, other.member.name, launchers.port), {"n": 7})
    answers["n3"].set()
    launchers.until(lambda: three.heard == [("n1", 7)])
    assert two.heard == []
    answers["n2"].set()
    launchers.until(lambda: two.heard == [("n1", 7)])


def test_a_name_that_was_looked_up_in_time_is_called_without_a_name_service(launchers: Launchers) -> None:
    """Nothing is sent before there is something to say."""
    asked: list[str] = []

    def lookup(host: str) -> str:
        asked.append(host)
        if len(asked) > 1:
            raise OSError(errno.ENOENT, "Name or service not known")
        return f"127.{NET}.2.{host[1:]}"

    one, two = launchers.start(1, lookup=lookup), launchers.start(2)
    named = Member("n2", "n2", launchers.port)
    one.transport.look_up([named])
    launchers.until(lambda: asked)
    launchers.pass_time(0.1)
    assert two.opened == []
    one.transport.send(named, {"n": 7})
    launchers.until(lambda: two.heard == [("n1", 7)])
    assert asked == ["n2"]


def test_a_name_without_an_address_is_said_once(launchers: Launchers) -> None:
    """Its launcher may still call this one, and is answered then."""

    def lookup(host: str) -> str:
        raise OSError(errno.ENOENT, "Name or service not known")

    one, two = launchers.start(1, lookup=lookup), launchers.start(2)
    unknown = Member("n2", "n2", launchers.port)
    for number in range(5):
        one.transport.send(unknown, {"n": number})
        launchers.pass_time(0.02)
    assert [text.partition(";")[0] for text in one.said] == ["n2 has no address here (Name or service not known)"]
    two.send(one)
    launchers.until(lambda: one.heard)
    one.transport.send(unknown, {"n": 9})
    launchers.until(lambda: two.heard == [("n1", 9)])


def test_one_that_has_ended_is_told_at_once(launchers: Launchers, pair: tuple[Launcher, Launcher]) -> None:
    """Its machine refuses connections: nobody waits for silence."""
    one, two = pair
    two.transport.close()
    launchers.until(lambda: one.gone == ["n2"])


def test_a_dropped_launcher_is_not_told_and_may_call_again(
    launchers: Launchers, pair: tuple[Launcher, Launcher]
) -> None:
    """The side that drops it knows that it is lost, or will know soon."""
    one, two = pair
    one.transport.drop("n2")
    two.send(one, 5)
    launchers.until(lambda: len(one.opened) == 2)
    assert one.gone == []
    two.send(one, 6)
    launchers.until(lambda: ("n2", 6) in one.heard)
    one.transport.drop("n9")


def test_the_next_process_of_a_launcher_is_told_apart(launchers: Launchers, pair: tuple[Launcher, Launcher]) -> None:
    """Once it has proven itself, nothing of the one before is heard any more."""
    one, two = pair
    again = Launcher(launchers.loop, Member("n2", two.member.address, launchers.port + 1))
    launchers.all.append(again)
    again.send(one, 7)
    launchers.until(lambda: ("n2", 7) in one.heard)
    assert one.opened == [("n2", two.own.incarnation), ("n2", again.own.incarnation)]
    assert one.gone == []
    launchers.until(lambda: two.superseded == 1)
    before = len(one.heard)
    two.send(one, 8)
    launchers.until(lambda: two.superseded == 2)
    assert any("another launcher n2, which was started later" in said for said in two.said)
    assert (one.superseded, again.superseded) == (0, 0)
    again.send(one, 9)
    launchers.until(lambda: len(one.heard) > before)
    assert one.heard[before:] == [("n2", 9)]


def test_connections_do_not_pile_up(launchers: Launchers, pair: tuple[Launcher, Launcher]) -> None:
    """A launcher that calls again has lost its connection, which this side may not have noticed: one stays."""
    one, two = pair
    opened: list[Connection] = []
    closed: list[Connection] = []
    for number in range(1, 31):
        Connection(
            socket.socket(), launchers.loop, one.own, expected=two.member,
            opened=opened.append, received=lambda *_: None, closed=lambda each, _: closed.append(each),
        )  # fmt: skip
        launchers.until(lambda number=number: len(opened) == number)  # type: ignore[misc]
    launchers.until(lambda: len(closed) >= 29)
    assert two.gone == two.said == []


def test_one_that_floods_is_cut_with_a_sentence(launchers: Launchers, pair: tuple[Launcher, Launcher]) -> None:
    """It knows the secret, and has gone wild: the others are heard meanwhile and afterwards."""
    one, two = pair
    three = launchers.start(3)

    def flood() -> None:
        if not one.said:
            for number in range(500):
                two.send(one, number)
            three.send(one, 1)
            launchers.loop.later(0.0, flood)

    flood()
    launchers.until(lambda: one.said)
    assert one.said[0].startswith(f"no connection with the launcher at {two.member.address} (n2): it says more than")
    three.send(one, 99)
    launchers.until(lambda: ("n3", 99) in one.heard)


def test_what_is_not_understood_is_said_once(launchers: Launchers, pair: tuple[Launcher, Launcher]) -> None:
    """A newer neighbour may say it twenty times a second; what else it says is heard."""
    one, two = pair
    for number in (-1, -1, 7):
        one.send(two, number)
    launchers.until(lambda: ("n1", 7) in two.heard)
    assert two.said == ["n1 sends a message of an unknown kind; it is ignored"]


@pytest.mark.parametrize(
    ("change", "why"),
    [({"secret": b"t" * 32}, "does not know the secret of this run"), ({"run": "other"}, "belongs to the run")],
)
def test_one_of_another_run_is_refused(launchers: Launchers, change: dict[str, Any], why: str) -> None:
    """Another secret or another run: a clear sentence on both sides, without the secret, and nothing is heard."""
    one, two = launchers.start(1), launchers.start(2, **change)
    two.send(one)
    launchers.until(lambda: one.said and two.said)
    assert why in one.said[0] + two.said[0]
    assert one.heard == one.opened == two.opened == []
