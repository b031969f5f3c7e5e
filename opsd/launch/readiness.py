"""Whether this node may take another's place: told to the head while it stands by, asked once more when it is to."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from opsd.launch.aside import aside
from opsd.launch.loop import Loop
from opsd.launch.messages import say
from opsd.launch.quorum.port import Quorum


class Readiness:
    """``ask`` says why the node must not be used, "" if it may; it may block. ``refused`` hears of each refusal."""

    def __init__(self, loop: Loop, quorum: Quorum, ask: Callable[[], str], refused: Callable[[str], None]) -> None:
        self._loop = loop
        self._quorum = quorum
        self._ask = ask
        self._refused = refused
        self._said: str | None = None

    def tell(self) -> None:
        """Let the head know."""
        aside(self._loop, self._ask, self._tell)

    def before(self, take_part: Callable[[], None]) -> None:
        """Go on with ``take_part`` if the node is ready; otherwise the head has to find another."""

        def answer(why: str | OSError) -> None:
            if why:
                self._tell(why)
            else:
                take_part()

        aside(self._loop, self._ask, answer)

    def _tell(self, why: str | OSError) -> None:
        text = str(why)
        self._quorum.tell_head({"kind": "readiness", "why": text})
        if text != self._said:
            self._said = text
            if text:
                say(f"this node is not used as a spare: {text}")
                self._refused(text)


def spare_readiness(environ: Mapping[str, str] = os.environ) -> str:
    """What the settings of this node ask of spares, and it does not have; see ``opsd.spares.duty``.

    Settings that cannot be read are a reason as well. Without a configuration file nothing is asked.
    """
    from opsd.config import (  # 0.2 s, which a launcher need not spend before it starts ranks
        ConfigError,
        find_file,
        load,
    )
    from opsd.slurm.connect import choose
    from opsd.spares.duty import why_not

    if find_file(env=environ) is None:
        return ""
    try:
        return why_not(load(env=environ), lambda: choose().slurm)
    except ConfigError as error:
        return str(error)
