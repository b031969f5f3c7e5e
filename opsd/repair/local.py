"""The parts of a repair on this machine, as the settings describe it; ``opsd.repair.parts`` says what they are.

``python -m opsd.repair.local driver FILE`` is such a part as a service: FILE is the configuration, the request comes
from stdin, and the answer goes to stdout.
"""

from __future__ import annotations

import json
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from opsd.collectors.nvml import NvmlSettings
from opsd.config import ConfigError, Settings, load
from opsd.control import MAX_ANSWER
from opsd.preflight.command import HISTORY
from opsd.repair import evidence
from opsd.repair.driver import NvidiaDriver
from opsd.repair.parts import Verbs, answer, verbs_of_driver, verbs_of_tests
from opsd.repair.retest import Preflight


def driver_of(settings: Settings) -> NvidiaDriver:
    """The driver of this node."""
    nvml = settings.section(NvmlSettings)
    return NvidiaDriver(nvml.library, ask=nvml.enabled, services=settings.repair.services)


def tests_of(settings: Settings, given: Sequence[str]) -> Preflight:
    """The tests of this node; ``given`` are the options with which its settings are found."""
    return Preflight(given, settings.policy.return_profile, settings.preflight.skip)


def sources_of(settings: Settings) -> evidence.Sources:
    """Where evidence of this node lies."""
    state_dir, nvml = settings.agent.state_dir, settings.section(NvmlSettings)
    return evidence.Sources(settings.agent.node, state_dir, state_dir / HISTORY, nvml.library)


def _verbs(part: str, file: str) -> Verbs:
    settings = load(Path(file))
    if part == "test":
        return verbs_of_tests(tests_of(settings, [f"--config={file}"]), _hung_up)
    sources = sources_of(settings)

    def archive(slurm_node: str) -> str:
        return str(evidence.make(replace(sources, slurm_node=slurm_node), time.time()))

    return verbs_of_driver(driver_of(settings), archive)


def _hung_up() -> str:
    """Why the answer is wanted no more, "" if it is: the load ends with the connection."""
    asker = select.poll()
    asker.register(sys.stdin, select.POLLRDHUP)
    return "nobody waits for it any more" if asker.poll(0) else ""


def main() -> None:
    """Answer one request."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # services that were stopped are started all the same
    _, part, file = sys.argv
    try:
        said = answer(_verbs(part, file), json.loads(sys.stdin.buffer.readline(MAX_ANSWER)))
    except ConfigError as error:
        said = {"failed": str(error)}
    except (ValueError, RecursionError):
        said = {"failed": "a request is one JSON object"}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
