"""A launcher that does nothing but claim with others, as a process: ``python group_process.py JSON``.

It prints a JSON object a line for everything that it is told, and gives everybody who is alive a slot in every plan.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from opsd.checkpoints.claims import End
from opsd.launch.claims.claim_store import Plan
from opsd.launch.claims.messages import Begun, Body, Ready
from opsd.launch.claims.tcp_group import TcpGroup
from opsd.launch.io.loop import Loop
from opsd.launch.io.protocol import Member


def note(what: str, **fields: Any) -> None:
    print(json.dumps({"event": what, "t": time.monotonic(), **fields}), flush=True)


class PrintingListener:
    """The listener."""

    def __init__(self, group: TcpGroup, least: int) -> None:
        self._group = group
        self._least = least

    def enough(self, reachable: Collection[str]) -> bool:
        return len(reachable) >= self._least

    def stuck(self) -> bool:
        return True

    def leader_changed(self, leader: str | None) -> None:
        note("leader", leader=leader)
        plan, group = self._group.plan, self._group
        goes_on = plan is not None and group.begun and group.holds and not set(plan.slots) - group.alive.keys()
        if leader == group.own.name and not goes_on:
            self._propose()

    def _propose(self) -> None:
        if len(self._group.alive) >= self._least:
            self._group.propose(tuple(sorted(self._group.alive)), {"keep": 0})

    def prepare(self, plan: Plan) -> None:
        self._group.ready(plan.number, Ready(1))

    def begin(self, plan: Plan, begun: Begun | None) -> None:
        note("begin" if begun else "missed", number=plan.number, slots=plan.slots)

    def cut_off(self) -> None:
        note("cut_off")

    def overtaken(self) -> None:
        note("overtaken")

    def over(self, end: End) -> None:
        note("over", code=end.code)

    def joined(self, member: Member) -> None:
        note("joined", name=member.name)
        self._propose()

    def lost(self, name: str, silent_s: float) -> None:
        note("lost", name=name, silent_s=silent_s)
        self._propose()

    def received(self, sender: str, body: Body) -> None:
        note("received", sender=sender, body=body)


def main() -> None:
    """Claim until killed."""
    settings = json.loads(sys.argv[1])
    members = [Member(*member) for member in settings["members"]]
    own, loop = Member(*settings["own"]), Loop()
    group = TcpGroup(
        own, members, Path(settings["folder"]), loop,
        start=settings["run"], launcher=f"{own.name}-{os.getpid()}", secret=bytes.fromhex(settings["secret"]), size=1,
        print_message=lambda text: note("said", text=text),
    )  # fmt: skip
    group.start(PrintingListener(group, settings["least"]))
    loop.run()


if __name__ == "__main__":
    main()
