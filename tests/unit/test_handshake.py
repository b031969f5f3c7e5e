"""How two launchers find out that they belong together, without a network."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from opsd.launch.io.handshake import VERSION, Handshake, Identity, Refusal, WireError, new_incarnation
from opsd.launch.io.protocol import Member

ONE = Identity(Member("n1", "10.0.0.1", 7), "run", b"s" * 32)
TWO = Identity(Member("n2", "10.0.0.2", 7), "run", b"s" * 32)


def shake(caller: Identity, called: Identity, *, change: dict[str, Any] | None = None) -> tuple[Handshake, Handshake]:
    """Both sides after all that they have to say; ``change`` is done to what the caller says first."""
    sides = Handshake(caller, called.member), Handshake(called, None)
    told = [{**message, **(change or {})} for message in sides[0].begin()]
    turn = 1
    while told:
        told = [answer for message in told for answer in sides[turn].hear(json.loads(json.dumps(message)))]
        turn = 1 - turn
    return sides


def test_both_sides_prove_themselves() -> None:
    """Each knows then who the other is, which process, and how to secure what follows."""
    caller, called = shake(ONE, TWO)
    assert caller.proven and called.proven
    assert (caller.peer, called.peer) == (TWO.member, ONE.member)
    assert (caller.incarnation, called.incarnation) == (TWO.incarnation, ONE.incarnation)
    assert (caller.key_in, caller.key_out) == (called.key_out, called.key_in)
    assert caller.key_in != caller.key_out


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (replace(TWO, secret=b"t" * 32), "does not know the secret of this run"),
        (replace(TWO, run="other"), "belongs to the run 'run' and not to 'other'"),
        (replace(TWO, member=Member("n1", "10.0.0.2", 7)), "has the same name, 'n1'"),
    ],
)
def test_who_does_not_belong_to_the_run_is_refused(other: Identity, why: str) -> None:
    """With a sentence that both sides can say."""
    with pytest.raises(Refusal, match=why):
        shake(ONE, other)


def test_who_answers_in_the_place_of_another_is_refused() -> None:
    """Its address may have been given to another node."""
    caller, called = Handshake(ONE, Member("n3", "10.0.0.2", 7)), Handshake(TWO, None)
    (greeting,) = caller.begin()
    with pytest.raises(Refusal, match="'n2' answers where 'n3' should be"):
        caller.hear(called.hear(greeting)[0])


@pytest.mark.parametrize("version", [VERSION + 2, VERSION - 1, 0, -1])
def test_a_version_too_far_away_is_refused(version: int) -> None:
    """Whatever else it says."""
    with pytest.raises(Refusal, match=f"speaks version {version} and this one {VERSION}; install the same opsd"):
        Handshake(ONE, None).hear({"opsd": version})


def test_the_next_version_is_understood() -> None:
    """Also if it says more of itself, which both sides prove to have heard."""
    caller, called = Handshake(ONE, TWO.member), Handshake(TWO, None)
    mine, proof = called.hear(caller.begin()[0] | {"opsd": VERSION + 1, "load": 0.5})
    caller.hear(mine)
    with pytest.raises(Refusal):
        caller.hear(proof)  # it was not the caller who has said that
    newer = Handshake(ONE, TWO.member)
    newer._mine.update({"opsd": VERSION + 1, "load": 0.5})
    called = Handshake(TWO, None)
    told = [newer.hear(message) for message in called.hear(newer.begin()[0])]
    called.hear(told[1][0])
    assert newer.proven and called.proven


@pytest.mark.parametrize(
    "messages",
    [
        [{}],
        [{"kind": "greeting", "opsd": VERSION}],
        [{"kind": "proof", "proof": "00"}],
        [{"kind": "beat"}],
        [{"kind": "greeting", "opsd": "2"}],
        [{"kind": "greeting", "opsd": VERSION, "run": "run", "member": ["n2", "10.0.0.2", 7], "nonce": "00"}],
    ],
)
def test_nonsense_ends_the_connection(messages: list[dict[str, Any]]) -> None:
    """Nobody is told anything."""
    with pytest.raises(WireError, match="does not speak the language of opsd launch") as error:
        for message in messages:
            Handshake(ONE, None).hear(message)
    assert not isinstance(error.value, Refusal)


@pytest.mark.parametrize("proof", ["", "00", "zz", "é", "\ud800", "0" * 64])
def test_a_wrong_proof_is_refused(proof: str) -> None:
    """Whatever it is made of."""
    called = Handshake(TWO, None)
    called.hear(Handshake(ONE, TWO.member).begin()[0])
    with pytest.raises(Refusal, match="does not know the secret"):
        called.hear({"kind": "proof", "proof": proof})
    assert not called.proven


def test_a_proof_cannot_be_used_again() -> None:
    """It belongs to the random numbers of one connection."""
    caller, called = Handshake(ONE, TWO.member), Handshake(TWO, None)
    greeting = caller.begin()[0]
    (proof,) = [answer for message in called.hear(greeting) for answer in caller.hear(message)]
    again = Handshake(TWO, None)
    again.hear(greeting)
    with pytest.raises(Refusal):
        again.hear(proof)


def test_a_proof_cannot_be_sent_back() -> None:
    """Who is called has another one than who calls."""
    called = Handshake(TWO, None)
    _, proof = called.hear(Handshake(ONE, TWO.member).begin()[0])
    with pytest.raises(Refusal):
        called.hear(proof)


def test_a_later_process_has_a_greater_incarnation() -> None:
    """So that all others agree which of two is the one that counts."""
    assert sorted(given := [new_incarnation() for _ in range(100)]) == given
    assert len(set(given)) == 100


def test_the_secret_is_not_shown() -> None:
    """An identity may end up in a traceback."""
    assert "ssss" not in repr(ONE)
