"""The two parts of a repair that have rights of their own, and what the repair asks of them.

Under systemd each is a service that is started for one request, by a connection to its socket: ``driver`` has the
rights for the driver, and no network; ``test`` has the GPUs and may load them. The part that uses Slurm and reads files
of users has neither. Both sides speak one JSON object a line: ``{"do": "reset_gpus"}``, and ``{"done": ...}`` or
``{"failed": "why"}``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from opsd.control import LOOK_S, ControlError, GivenUpError, ask
from opsd.repair.machine import Driver, RemedyError
from opsd.repair.repair_plan import NO_HARDWARE
from opsd.repair.retest import RETEST_S, Retested, Tests

Part = Literal["driver", "test"]
DRIVER_S: Final = 3600.0
"""Longer than the deadlines of all that a remedy does, taken together; RuntimeMaxSec= of the unit as well."""
TEST_S: Final = 2 * RETEST_S + 3600.0
"""The same of a test, which is two preflights."""


@dataclass(frozen=True, slots=True)
class RemoteDriver:
    """A ``Driver`` whose service listens at ``socket``."""

    socket: Path

    def recovery_actions(self) -> Sequence[int]:
        try:
            return [int(action) for action in self._ask("recovery_actions")]
        except (RemedyError, TypeError, ValueError):
            return []

    def reset_gpus(self, services: Sequence[str] = ()) -> str:
        return str(self._ask("reset_gpus", services=[*services]))

    def reload_driver(self, services: Sequence[str] = ()) -> str:
        return str(self._ask("reload_driver", services=[*services]))

    def restore(self) -> None:
        with suppress(RemedyError):
            self._ask("restore")

    def evidence(self, slurm_node: str) -> str:
        """Make the archive of evidence and return its path. Raises RemedyError."""
        return str(self._ask("evidence", slurm_node=slurm_node))

    def _ask(self, do: str, **told: object) -> Any:
        return _asked(self.socket, {"do": do, **told}, DRIVER_S)


class _StoppedError(RemedyError):
    """A test that had to make way."""


@dataclass(frozen=True, slots=True)
class RemoteTests:
    """``Tests`` whose service listens at ``socket``, and ends its test when the connection is closed."""

    socket: Path
    look_s: float = LOOK_S

    def __call__(self, checks: Sequence[str], stop: Callable[[], str]) -> Retested:
        return self._tested({"do": "retest", "checks": [*checks]}, stop)

    def with_partner(self, hosts: Sequence[str], port: int, stop: Callable[[], str]) -> Retested:
        return self._tested({"do": "with_partner", "hosts": [*hosts], "port": port}, stop)

    def _tested(self, request: Mapping[str, object], stop: Callable[[], str]) -> Retested:
        try:
            found = self._ask(request, stop)
            return Retested(found["passed"] is True, str(found["detail"]))
        except _StoppedError as error:
            return Retested(False, str(error), stopped=True)
        except RemedyError as error:
            return Retested(False, f"{NO_HARDWARE}{error}")
        except (KeyError, TypeError):
            return Retested(False, f"{NO_HARDWARE}the test's service answered something else than a result")

    def as_spare(self, stop: Callable[[], str]) -> str:
        try:
            return str(self._ask({"do": "as_spare"}, stop))
        except RemedyError as error:
            return str(error)

    def _ask(self, request: Mapping[str, object], stop: Callable[[], str]) -> Any:
        try:
            return _asked(self.socket, request, TEST_S, stop, self.look_s)
        except GivenUpError as error:
            raise _StoppedError(f"the test was stopped: {error}") from error


def _asked(
    socket: Path,
    request: Mapping[str, object],
    timeout_s: float,
    stop: Callable[[], str] = str,
    look_s: float = LOOK_S,
) -> Any:
    name = f"opsd-repair-{socket.name}"
    try:
        answer = ask(socket, request, timeout_s, name, stop, look_s)
    except ControlError as error:
        raise RemedyError(f"{error}; see journalctl -u '{name}@*'") from error
    if "done" not in answer:
        raise RemedyError(str(answer.get("failed", f"{name} did nothing")))
    return answer["done"]


Verbs = Mapping[str, Callable[[Mapping[str, Any]], object]]


def verbs_of_driver(driver: Driver, evidence: Callable[[str], str]) -> Verbs:
    """The work of the part ``driver``. Raise RemedyError and OSError."""
    return {
        "recovery_actions": lambda _: [*driver.recovery_actions()],
        "reset_gpus": lambda told: driver.reset_gpus([str(name) for name in told.get("services", ())]),
        "reload_driver": lambda told: driver.reload_driver([str(name) for name in told.get("services", ())]),
        "restore": lambda _: driver.restore(),
        "evidence": lambda told: evidence(str(told.get("slurm_node", ""))),
    }


def verbs_of_tests(tests: Tests, stop: Callable[[], str]) -> Verbs:
    """The work of the part ``test``, until ``stop`` says why it must end."""
    return {
        "retest": lambda told: asdict(tests([str(name) for name in told.get("checks", ())], stop)),
        "as_spare": lambda _: tests.as_spare(stop),
        "with_partner": lambda told: asdict(
            tests.with_partner([str(name) for name in told.get("hosts", ())], int(told.get("port", 0)), stop)
        ),
    }


def answer(verbs: Verbs, request: object) -> dict[str, object]:
    """The answer to ``request``, which root has sent. Raises nothing that a remedy may raise."""
    verb = verbs.get(str(request.get("do"))) if isinstance(request, Mapping) else None
    if verb is None or not isinstance(request, Mapping):
        return {"failed": f"a request is one of {', '.join(verbs)}"}
    try:
        return {"done": verb(request)}
    except (RemedyError, OSError) as error:
        return {"failed": str(error)}
