"""NVIDIA's driver in a repair: resets of GPUs, and the modules unloaded and loaded again. Each call has a deadline."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from opsd.collectors.base import NoData
from opsd.collectors.lib.nvml.series import RECOVERY_ACTION
from opsd.collectors.nvml import NvmlCollector
from opsd.repair.machine import FABRIC, RemedyError, Run, run_command

DEADLINE_S = 60.0


def read(library: str | None, run: Run) -> Mapping[str, Any]:
    """``{"facts": [...], "samples": [[name, labels, value], ...]}``. Raises RemedyError."""
    said = run([sys.executable, "-P", "-m", __name__, library or ""], DEADLINE_S).splitlines()
    try:
        state: Mapping[str, Any] = json.loads(said[-1])
    except (IndexError, ValueError) as error:
        raise RemedyError("the driver's state could not be read") from error
    if "missing" in state:
        raise RemedyError(str(state["missing"]))
    return state


def recovery_actions(library: str | None, run: Run) -> list[int]:
    """What the driver asks for, for each GPU that answers; empty if the driver does not answer."""
    try:
        samples = read(library, run)["samples"]
    except RemedyError:
        return []
    return [int(value) for name, _labels, value in samples if name == RECOVERY_ACTION.name]


def main() -> None:
    """Print the state on one line; the argument is the library of NVML, "" for the driver's own."""
    try:
        reading = NvmlCollector(sys.argv[1] or None).collect()
    except Exception as error:  # a broken driver may raise anything
        print(json.dumps({"missing": f"{type(error).__name__}: {error}"}))
        return
    if isinstance(reading, NoData):
        print(json.dumps({"missing": reading.reason}))
        return
    samples = [[s.metric.name, dict(zip(s.metric.labels, s.labels, strict=True)), s.value] for s in reading.samples]
    print(json.dumps({"facts": [asdict(fact) for fact in reading.facts], "samples": samples}, default=str))


MODULE: Final = "nvidia"
"""The driver's; those that use it (nvidia_uvm, nvidia_peermem, gdrdrv, nvidia_fs …) are unloaded before it."""
HOLD_MODULES: Final = (FABRIC, "nvidia-imex")
"""Hold the driver's modules, and no GPU."""
RESET_S, MODULES_S, SERVICE_S = 300.0, 120.0, 90.0
TRIES, BETWEEN_S = 3, 5.0
"""Of a reset that is refused because a GPU is in use: a health check or an exporter looks at it for a second."""
IN_USE: Final = re.compile("in use|being used", re.IGNORECASE)


class NvidiaDriver:
    """The driver of this node, a ``Driver``.

    ``library`` is that of NVML, None for the driver's own; without ``ask`` it is not asked. ``services`` hold GPUs
    open: they are stopped for a reset, which is refused while anybody does (nvidia-smi(1)).
    """

    def __init__(
        self,
        library: str | None = None,
        *,
        ask: bool = True,
        services: Sequence[str] = (),
        run: Run = run_command,
        proc: Path = Path("/proc"),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._library, self._ask, self._services = library, ask, services
        self._run, self._proc, self._sleep = run, proc, sleep

    def recovery_actions(self) -> Sequence[int]:
        return recovery_actions(self._library, self._run) if self._ask else []

    def reset_gpus(self, services: Sequence[str] = ()) -> str:
        """All of them: the node is empty, and GPUs that NVLink connects may only be resettable together."""
        with self._persistence_kept(), self._without((*self._services, *self._dynamic(services))):
            self._reset()
        return "reset all GPUs"

    def _reset(self, tries: int = TRIES) -> None:
        try:
            self._run(["nvidia-smi", "--gpu-reset"], RESET_S)
        except RemedyError as error:
            if tries == 1 or not IN_USE.search(str(error)):
                raise
            self._sleep(BETWEEN_S)
            self._reset(tries - 1)

    def reload_driver(self, services: Sequence[str] = ()) -> str:
        loaded = self._modules()
        if not loaded:
            raise RemedyError("no module of the NVIDIA driver is loaded")
        with self._persistence_kept(), self._without((*self._services, *self._dynamic(services), *HOLD_MODULES)):
            try:
                for name in loaded:
                    self._run(["modprobe", "--remove", name], MODULES_S)
            finally:
                for name in reversed(loaded):
                    self._run(["modprobe", name], MODULES_S)
        self._start_enabled(FABRIC)  # one that had failed was not running before
        return f"loaded {', '.join(reversed(loaded))} again"

    def restore(self) -> None:
        for name in (*HOLD_MODULES, *self._services):
            self._start_enabled(name)

    def _dynamic(self, services: Sequence[str]) -> list[str]:
        """Those of ``services`` that have DynamicUser=: who decides a repair may have no others stopped."""
        return [name for name in services if self._has_dynamic_user(name)]

    def _has_dynamic_user(self, name: str) -> bool:
        try:
            shown = self._run(["systemctl", "show", "--property=DynamicUser", "--value", "--", name], SERVICE_S)
        except RemedyError:
            return False
        return shown.strip() == "yes"

    def _start_enabled(self, name: str) -> None:
        with suppress(RemedyError):  # it is not enabled, or shows in the retest
            self._run(["systemctl", "is-enabled", "--quiet", name], SERVICE_S)
            self._run(["systemctl", "start", name], SERVICE_S)

    def _modules(self) -> list[str]:
        """The driver's module and all that use it, each before those that it needs; empty if it is not loaded."""
        try:
            lines = (self._proc / "modules").read_text(encoding="ascii").splitlines()
        except OSError as error:
            raise RemedyError(f"{self._proc / 'modules'}: {error.strerror}") from error
        users = {name: by.split(",") for name, _, _, by, *_ in map(str.split, filter(None, lines))}
        found: list[str] = []

        def visit(name: str) -> None:
            for user in users[name]:
                if user in users and user not in found:
                    visit(user)
            found.append(name)

        if MODULE in users:
            visit(MODULE)
        return found

    @contextmanager
    def _persistence_kept(self) -> Iterator[None]:
        """Persistence mode is on afterwards if it was: a reset, a reload, and the end of its daemon switch it off.

        Debian's unit starts the daemon without it, and what switches it on at boot is seldom the unit itself.
        """
        try:
            modes = self._run(["nvidia-smi", "--query-gpu=persistence_mode", "--format=csv,noheader"], SERVICE_S)
        except RemedyError:  # a GPU that does not answer; the daemon's own unit may do it
            modes = ""
        try:
            yield
        finally:
            if "Enabled" in modes:
                with suppress(RemedyError):
                    self._run(["nvidia-smi", "--persistence-mode=1"], SERVICE_S)

    @contextmanager
    def _without(self, services: Iterable[str]) -> Iterator[None]:
        """Meanwhile none of ``services`` runs; those that ran are started again, whatever happens."""
        running = [name for name in services if self._is_active(name)]  # before one takes others down with it
        try:
            for name in running:
                self._run(["systemctl", "stop", name], SERVICE_S)
            yield
        finally:
            for name in reversed(running):
                with suppress(RemedyError):  # a service that does not start shows in the retest, or as its own incident
                    self._run(["systemctl", "start", name], SERVICE_S)

    def _is_active(self, name: str) -> bool:
        try:
            self._run(["systemctl", "is-active", "--quiet", name], SERVICE_S)
        except RemedyError:
            return False
        return True


if __name__ == "__main__":
    main()
