"""Nodes that are network namespaces on one machine, with links whose speed can be set (needs root, ip and tc)."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from types import TracebackType
from typing import Self

_MADE = itertools.count()


class NoNamespacesError(Exception):
    """This machine cannot make network namespaces; the message says why."""


class Namespaces:
    """``count`` namespaces on one bridge, each with an address and a link of ``mbit`` Mbit/s in both directions."""

    def __init__(self, count: int, *, mbit: float, prefix: str = "opsdpf") -> None:
        if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
            raise NoNamespacesError("network namespaces need root, ip and tc")
        self.count = count
        self._mbit = mbit
        # The kernel removes the links of deleted namespaces only later, so names are not reused.
        self._prefix = f"{prefix}{os.getpid() % 10_000:04}{next(_MADE) % 100:02}"

    def __enter__(self) -> Self:
        try:
            self._build()
        except subprocess.CalledProcessError as error:
            self._remove()
            raise NoNamespacesError(f"{' '.join(error.cmd)} failed: {error.stderr.decode().strip()}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._remove()

    def address(self, node: int) -> str:
        """The address of a node on the bridge."""
        return f"10.213.0.{node + 1}"

    def command(self, node: int) -> list[str]:
        """Prefix of a command line that runs it on a node."""
        return ["ip", "netns", "exec", self._name(node)]

    def set_speed(self, node: int, mbit: float) -> None:
        """Limit what the node sends and receives to ``mbit`` Mbit/s."""
        limit = ["root", "tbf", "rate", f"{mbit:.0f}mbit", "burst", "64k", "latency", "50ms"]
        _run("tc", "qdisc", "replace", "dev", self._link(node), *limit)
        _run(*self.command(node), "tc", "qdisc", "replace", "dev", "eth0", *limit)

    def _name(self, node: int) -> str:
        return f"{self._prefix}n{node}"

    def _link(self, node: int) -> str:
        return f"{self._prefix}v{node}"

    def _build(self) -> None:
        _run("ip", "link", "add", self._prefix, "type", "bridge")
        _run("ip", "link", "set", self._prefix, "up")
        for node in range(self.count):
            name, link = self._name(node), self._link(node)
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", link, "master", self._prefix, "up")
            _run(*self.command(node), "ip", "address", "add", f"{self.address(node)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _run(*self.command(node), "ip", "link", "set", device, "up")
            self.set_speed(node, self._mbit)

    def _remove(self) -> None:
        commands = [["ip", "netns", "delete", self._name(node)] for node in range(self.count)]
        for command in [*commands, ["ip", "link", "delete", self._prefix]]:
            with contextlib.suppress(subprocess.CalledProcessError):
                _run(*command)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)
