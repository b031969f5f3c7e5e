"""Claims told by what they change: put together again they are the same, or else they are read from the folder."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.checkpoints import claims
from opsd.checkpoints.claims import Claim
from opsd.launch.claims.claim_store import Plan, listening
from opsd.launch.claims.generation_state import MOST_CHANGES, changes_of, claim_from
from opsd.launch.claims.messages import MESSAGES, Claimed, Message
from opsd.launch.io.protocol import Codec, Member
from tests.fakes.protocol import Launchers

NAMES = st.lists(st.sampled_from([f"n{number}" for number in range(12)]), min_size=1, max_size=12, unique=True)
CODEC = Codec(MESSAGES)
MANY = 32


def plan_of(number: int, names: list[str], at_work: int, again: Collection[str] = ()) -> Plan:
    """Launchers that were started ``again`` listen at another port."""
    members = tuple(Member(name, f"10.0.0.{name[1:]}", 1 + (name in again)) for name in sorted(names))
    sizes = {name: 8 + (name == "n3") for name in sorted(names)}
    return Plan(number, names[0], tuple(names[:at_work]), members, sizes, {"keep": 0, "restarts": number})


def claim_of(plan: Plan) -> Claim:
    return Claim(plan.number, "start", "n0-1", plan=json.loads(json.dumps(plan.to_json())), keeps=0)


@given(before=NAMES, after=NAMES, at_work=st.integers(0, 12), again=NAMES)
def test_a_claim_that_was_told_is_the_one_that_was_made(
    before: list[str], after: list[str], at_work: int, again: list[str]
) -> None:
    """Whoever has come, gone and come again, and in whatever order nodes have slots."""
    base, plan = plan_of(4, before, at_work), plan_of(5, after, at_work, again)
    message = changes_of(claim_of(plan), plan, base, 8)
    assert message is not None
    heard = CODEC.decode(json.loads(json.dumps(CODEC.encode(message))))
    assert claim_from(heard, base, plan.leader, "start") == claim_of(plan)


@pytest.mark.parametrize(
    "changed",
    [{"base": 3}, {"mark": "0"}, {"slots": 10**9}, {"slots": -1}, {"left": ("n2",)}, {"payload": {"keep": 4}}],
    ids=str,
)
def test_what_does_not_fit_is_not_believed(changed: dict[str, object]) -> None:
    """It is read instead."""
    base, plan = plan_of(4, ["n0", "n1", "n2"], 2), plan_of(5, ["n0", "n2", "n3"], 2)
    message = changes_of(claim_of(plan), plan, base, 8)
    assert message is not None
    assert claim_from(message, base, "n0", "start") is not None
    assert claim_from(replace(message, **changed), base, "n0", "start") is None  # type: ignore[arg-type]
    assert claim_from(message, base, "n2", "start") is None


def test_much_that_changes_is_not_told() -> None:
    """The leader would send all of it to all."""
    plan = plan_of(5, [f"n{number}" for number in range(MOST_CHANGES + 2)], 2)
    assert changes_of(claim_of(plan), plan, plan_of(4, ["n0"], 1), 8) is None


def test_the_loss_of_128_nodes_is_told_in_few_bytes() -> None:
    """Racks that lose their power: of a claim of 4,096 launchers each would read fifty times as much."""
    names = [f"n{number:05d}" for number in range(4096)]
    base = plan_of(4, names, 3968)
    lost = set(base.slots[31::31][:128])
    spares = iter(names[3968:])
    there = plan_of(5, [name for name in names if name not in lost], 0)
    plan = replace(there, slots=tuple(next(spares) if name in lost else name for name in base.slots))
    message = changes_of(claim_of(plan), plan, base, 8)
    assert message is not None
    told = len(json.dumps(CODEC.encode(message)))
    assert 50 * told < len(json.dumps(claim_of(plan).plan))
    assert claim_from(message, base, plan.leader, "start") == claim_of(plan)


@pytest.mark.parametrize("how", ["read", "told"])
def test_a_claim_says_where_its_leader_listens(how: str) -> None:
    """A launcher that was given names alone calls the leader without a name service; who leads next is said anew."""
    base = plan_of(4, ["n0", "n1", "n2"], 2)
    plan = replace(plan_of(5, ["n1", "n2"], 2), members=listening(base.members[1:], "n1", "192.0.2.7"))
    claim: Claim | None = claim_of(plan)
    if how == "told":
        told = changes_of(claim_of(plan), plan, base, 8)
        assert told is not None
        claim = claim_from(CODEC.decode(json.loads(json.dumps(CODEC.encode(told)))), base, "n1", "start")
    assert claim is not None
    members = Plan.from_json(5, claim.plan).members
    assert [(one.name, one.host) for one in members] == [("n1", "192.0.2.7"), ("n2", "10.0.0.2")]


def test_a_claim_of_a_version_that_does_not_say_where_its_leader_listens() -> None:
    """Its address is the one that is listed."""
    raw = claim_of(plan_of(4, ["n1", "n2"], 2)).plan
    members = Plan.from_json(4, {key: each for key, each in raw.items() if key != "head_listens"}).members
    assert [one.host for one in members] == ["10.0.0.1", "10.0.0.2"]


def test_the_folder_says_which_claim_holds(tmp_path: Path) -> None:
    """A claim that was told counts once its file is there, and no longer than until the next one."""
    told = claims.Found(Claim(1, "run", "told"), None)
    assert claims.newest_unless(tmp_path, told) is None
    claims.create(tmp_path, Claim(1, "run", "n1-1"))
    found = claims.newest_unless(tmp_path, told)
    assert found is not None
    assert found.claim.launcher == "told"
    assert claims.newest_unless(tmp_path, found) is found
    claims.create(tmp_path, Claim(2, "run", "n2-1"))
    later = claims.newest_unless(tmp_path, found)
    assert later is not None
    assert later.claim.launcher == "n2-1"


class Untold(Launchers):
    """Launchers whose claims are not told."""

    def send(self, source: str, target: Member, message: Message) -> None:
        if not isinstance(message, Claimed):
            super().send(source, target, message)


@pytest.mark.parametrize(("kind", "readers"), [(Launchers, 0), (Untold, MANY)])
def test_nobody_reads_what_was_told(kind: type[Launchers], readers: int) -> None:
    """After the loss of a node all but the leader would read the claim; they agree either way."""
    world = kind(MANY, 2)
    world.until_agreed()
    world.pass_time(2.0)
    lost = world.claims[-1].plan["slots"][-1]
    world.lose(lost)
    world.until_agreed(without=[lost])
    assert world.bytes_read == readers * world.claim_bytes


class Late(Launchers):
    """One launcher and the successor of a lost leader do not hear each other until that has claimed."""

    late = ""
    newest = 0

    def send(self, source: str, target: Member, message: Message) -> None:
        if self.late not in (source, target.name) or len(self.claims) > self.newest:
            super().send(source, target, message)


def test_who_was_not_heard_in_time_is_told_when_it_asks() -> None:
    """It does not read the claim either."""
    world = Late(MANY, 2)
    world.until_agreed()
    world.pass_time(2.0)
    leader = world.leader.name
    world.late, world.newest = world.claims[-1].plan["slots"][-1], len(world.claims)
    world.lose(leader)
    world.until_agreed(without=[leader])
    assert world.late not in world.claims[-1].plan["slots"]
    assert world.bytes_read == 0
