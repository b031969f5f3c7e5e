"""Prometheus, Alertmanager and an agent as processes on loopback ports, with the shipped configuration."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from opsd.dashboards.alerts import linked
from opsd.dependents import Dependents
from opsd.ports import free_port
from opsd.preflight.inbox import Inbox
from opsd.stack.node import StackNode

DEPLOY = Path(__file__).parents[2] / "deploy"
PROGRAMS = ("prometheus", "prometheus-alertmanager")
START_S = 30.0


class StackError(Exception):
    """The stack could not be started; the message says what is missing or which log to read."""


class Stack:
    """The stack, with its files in ``folder``. Raises StackError.

    ``scrape_s`` is the scrape interval in seconds, ``rules_s`` overrides the evaluation interval of the rules.
    ``node_exporters`` are further addresses to scrape. ``nodes`` are closed with the stack; without any there is one,
    whose instance is its address instead of its name. ``silent`` are names of nodes that do not answer. A ``temporary``
    folder is removed with the stack, however that ends.
    """

    def __init__(
        self, folder: Path, *, scrape_s: float = 15.0, rules_s: float | None = None,
        node_exporters: Sequence[str] = (), nodes: Sequence[StackNode] = (), silent: Sequence[str] = (),
        temporary: bool = False,
    ) -> None:  # fmt: skip
        if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
            raise StackError(f"{' and '.join(missing)} missing; install the Debian packages of the same name")
        if not (DEPLOY / "alertmanager").is_dir():
            raise StackError(f"{DEPLOY} is missing; the stack is started from a checkout")
        self.folder, self._scrape_s, self._rules_s = folder, scrape_s, rules_s
        self._node_exporters, self._silent, self._named = node_exporters, silent, bool(nodes)
        self._dependents = Dependents()
        if temporary:
            self._dependents.folder(folder)
        self._nodes = nodes or (StackNode(folder),)
        prometheus, alertmanager, self._nowhere, *agents = (free_port() for _ in range(3 + len(self._nodes)))
        self.prometheus, self.alertmanager, self.agent = (
            f"http://127.0.0.1:{port}" for port in (prometheus, alertmanager, agents[0])
        )
        self.inbox = Inbox()
        self.node = self._nodes[0]
        try:
            self._start(agents, prometheus, alertmanager)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that Prometheus returns now. Raises ValueError for an invalid expression."""
        asked = urllib.parse.urlencode({"query": expression})
        try:
            answer = get(f"{self.prometheus}/api/v1/query?{asked}")
        except urllib.error.HTTPError as error:
            raise ValueError(f"{expression}: {error.read().decode()}") from error
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def close(self) -> None:
        """End everything."""
        self._dependents.close()
        for node in self._nodes:
            node.close()
        self.inbox.close()

    def _start(self, agents: Sequence[int], prometheus: int, alertmanager: int) -> None:
        for node, port in zip(self._nodes, agents, strict=True):
            command = [sys.executable, "-m", "opsd", "agent", "--config", str(node.configuration(port))]
            self._run("agent" if node is self.node else node.name, command, node.environment())
        self._run(
            "alertmanager",
            [
                "prometheus-alertmanager", f"--config.file={self._alertmanager_file()}",
                f"--storage.path={self.folder}/alertmanager", f"--web.listen-address=127.0.0.1:{alertmanager}",
                "--cluster.listen-address=",
            ],
        )  # fmt: skip
        self._run(
            "prometheus",
            [
                "prometheus", f"--config.file={self._prometheus_file(agents, alertmanager)}",
                f"--storage.tsdb.path={self.folder}/prometheus", f"--web.listen-address=127.0.0.1:{prometheus}",
            ],
        )  # fmt: skip
        for name, url in (
            ("agent", f"{self.agent}/readyz"),
            ("alertmanager", f"{self.alertmanager}/-/ready"),
            ("prometheus", f"{self.prometheus}/-/ready"),
        ):
            if not eventually(lambda url=url: _answers(url), START_S):  # type: ignore[misc]
                raise StackError(f"{name} does not answer; see {self.folder}/{name}.log")

    def _run(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._dependents.start(command, log, environment)

    def _targets(self, agents: Sequence[int]) -> Iterator[Mapping[str, object]]:
        names = [*(node.name for node in self._nodes), *self._silent]
        for name, port in zip(names, [*agents, *(self._nowhere for _ in self._silent)], strict=True):
            labels = {"cluster": "demo", **({"instance": f"{name}:9477"} if self._named else {})}
            yield {"targets": [f"127.0.0.1:{port}"], "labels": labels}

    def _prometheus_file(self, agents: Sequence[int], alertmanager: int) -> Path:
        """The shipped configuration, with targets and rules in the folder of the stack."""
        rules = self.folder / "rules"
        rules.mkdir()
        for name, text in linked().items():
            (rules / name).write_text(
                text if self._rules_s is None else re.sub(r"interval: \w+", f"interval: {self._rules_s:g}s", text)
            )
        (self.folder / "opsd-targets.json").write_text(json.dumps([*self._targets(agents)]))
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"].update(scrape_interval=f"{self._scrape_s:g}s", scrape_timeout=f"{min(5.0, self._scrape_s):g}s")
        config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{alertmanager}"]
        config["scrape_configs"] = [job for job in config["scrape_configs"] if job["job_name"] == "opsd"]
        if self._node_exporters:
            static = [{"targets": [*self._node_exporters], "labels": {"cluster": "demo"}}]
            config["scrape_configs"].append({"job_name": "node", "static_configs": static})
        file = self.folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        return file

    def _alertmanager_file(self) -> Path:
        """The shipped configuration, with every receiver's address replaced by that of the inbox."""
        text = (DEPLOY / "alertmanager" / "alertmanager.yml").read_text(encoding="utf-8")
        secrets = self.folder / "secrets"
        secrets.mkdir()
        (secrets / "slack-webhook").write_text(f"{self.inbox.url}/slack")
        (secrets / "pagerduty-key").write_text("0" * 32)
        config = yaml.safe_load(text.replace("/etc/prometheus/secrets", str(secrets)))
        config["global"]["pagerduty_url"] = f"{self.inbox.url}/pagerduty"
        config["templates"] = [str(DEPLOY / "alertmanager" / "templates" / "*.tmpl")]
        for receiver in config["receivers"]:
            for webhook in receiver.get("webhook_configs", ()):
                webhook["url"] = f"{self.inbox.url}/webhook"
        file = self.folder / "alertmanager.yml"
        file.write_text(yaml.safe_dump(config))
        return file


def get(url: str) -> Any:
    """The JSON at ``url``."""
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310
        return json.load(answer)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):  # noqa: S310
            return True
    except OSError:
        return False


def eventually(condition: Callable[[], bool], within_s: float) -> bool:
    """True once ``condition`` is, False after the time limit."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
