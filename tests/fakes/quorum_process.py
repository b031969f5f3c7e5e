"""A launcher that does nothing but agree with others, as a process: ``python quorum_process.py JSON``.

It prints a JSON object a line for everything that it is told, and gives everybody who is alive a slot in every plan.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from opsd.launch.io.loop import Loop
from opsd.launch.io.member import Member, Message
from opsd.launch.quorum.node import TcpQuorum
from opsd.launch.quorum.port import Plan


class Agreeing:
    """The listener."""

    def __init__(self, quorum: TcpQuorum, least: int) -> None:
        self._quorum = quorum
        self._least = least
        self._began = time.monotonic()

    def note(self, what: str, **fields: Any) -> None:
        print(json.dumps({"event": what, "t": time.monotonic(), **fields}), flush=True)

    def head_changed(self, head: str | None) -> None:
        self.note("head", head=head)
        if head == self._quorum.own.name:
            self._propose()

    def _propose(self) -> None:
        if len(self._quorum.alive) >= self._least:
            self._quorum.propose(tuple(sorted(self._quorum.alive)), {})

    def prepare(self, plan: Plan) -> None:
        self._quorum.ready(plan.number, {})

    def begin(self, plan: Plan, answers: Mapping[str, Message]) -> None:
        self.note("begin", number=plan.number, slots=plan.slots)

    def isolated(self) -> None:
        self.note("isolated")

    def tied(self, absent: tuple[str, ...]) -> None:
        self.note("tied", absent=absent)
        self._quorum.decide_tie(True)

    def joined(self, member: Member) -> None:
        self.note("joined", name=member.name)
        self._propose()

    def lost(self, name: str, silent_s: float) -> None:
        self.note("lost", name=name, silent_s=silent_s)
        self._propose()

    def received(self, sender: str, message: Message) -> None:
        self.note("received", sender=sender, message=message)


def main() -> None:
    """Agree until killed."""
    settings = json.loads(sys.argv[1])
    members = [Member(*member) for member in settings["members"]]
    loop = Loop()
    quorum = TcpQuorum(
        Member(*settings["own"]),
        members,
        run=settings["run"],
        secret=bytes.fromhex(settings["secret"]),
        loop=loop,
        say=lambda text: print(json.dumps({"event": "said", "t": time.monotonic(), "text": text}), flush=True),
    )
    quorum.start(Agreeing(quorum, settings["least"]))
    loop.run()


if __name__ == "__main__":
    main()
