"""What other monitors of GPU nodes match in the kernel log, beside what opsd hears.

Their patterns and the lines of their own tests are read from clones of their repositories. Nothing of theirs is part of
this project. A pattern is heard if opsd makes an event of one of the lines that it matches. Those that opsd does not
hear are listed in ``tests/outside/wording.toml``, with the reason in the guide of operations.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from opsd.bench import BenchError
from opsd.bench.outside import FOLDER
from opsd.collectors.kmsg import parse_message

CORPORA: Mapping[str, str] = {
    "gpud": "https://github.com/leptonai/gpud",
    "node-problem-detector": "https://github.com/kubernetes/node-problem-detector",
    "NVSentinel": "https://github.com/NVIDIA/NVSentinel",
}
REASONS = FOLDER / "wording.toml"

_QUOTED = re.compile(r"`([^`]*)`")
_LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"|`([^`]*)`')
_STAMP = re.compile(r"^(?:kern\s*:\w+\s*:\s*)?(?:<\d+>)?(?:\d+,\d+,\d+,[^;]*;)?(?:\[[^\]]*\d[^\]]*\]\s*|\d{4}-\S+\s+)*")


def run(outside: Path | None = None) -> dict[str, Any]:
    """Counts of each corpus, and the names of its patterns that opsd neither hears nor has a reason for.

    ``outside`` has clones by the names of the repositories; without it they are fetched. Raises BenchError.
    """
    if outside is not None:
        return _compared(outside)
    with tempfile.TemporaryDirectory(prefix="opsd-wording-") as folder:
        for name, url in CORPORA.items():
            command = ["git", "clone", "--quiet", "--depth=1", url, f"{folder}/{name}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise BenchError(f"{url} cannot be fetched; name a folder with clones with --outside")
        return _compared(Path(folder))


def _compared(folder: Path) -> dict[str, Any]:
    explained = {name for row in tomllib.loads(REASONS.read_text(encoding="utf-8"))["row"] for name in row["names"]}
    found = {
        name: compared(folder / name, patterns, {each.partition(" ")[2] for each in explained if each.startswith(name)})
        for name, patterns in _PATTERNS.items()
        if (folder / name).is_dir()
    }
    if not found:
        raise BenchError(f"{folder} has no clone of {', '.join(CORPORA)}")
    return found


def compared(clone: Path, patterns: Callable[[Path], Iterator[tuple[str, str]]], explained: set[str]) -> dict[str, Any]:
    """How many patterns of ``clone`` opsd hears, and which it does not."""
    said, heard, silent, bare = [*lines(clone)], set[str](), set[str](), set[str]()
    for name, pattern in patterns(clone):
        matched = [line for line in said if re.search(pattern, line)]
        (bare if not matched else heard if any(map(parse_message, matched)) else silent).add(name)
    silent -= heard
    return {
        "patterns": len(heard | silent | bare),
        "heard": len(heard),
        "explained": len(silent & explained),
        "unexplained": ", ".join(sorted(silent - explained)),
        "without a line of theirs": ", ".join(sorted(bare - heard - silent - explained)),
    }


def lines(clone: Path) -> Iterator[str]:
    """What may be lines of the kernel log in the tests of ``clone``, without time stamps. Patterns are none."""
    for file in sorted(clone.rglob("*")):
        of_tests = file.name.endswith("_test.go") or {"testdata", "problems"} & {*file.parts}
        if not file.is_file() or not of_tests:
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        if file.suffix == ".go":
            text = "\n".join(raw or quoted.replace(r"\"", '"') for quoted, raw in _LITERAL.findall(text))
        yield from (_STAMP.sub("", line.strip()) for line in text.splitlines() if ".*" not in line)


def _of_gpud(clone: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(clone.glob("components/**/kmsg_matcher.go")):
        yield from re.findall(r"\bregex(\w+)\s*=\s*`([^`]+)`", file.read_text(encoding="utf-8"))


def _of_node_problem_detector(clone: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(clone.glob("config/*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.get("plugin") in ("kmsg", "filelog") and "kern" in file.name + content.get("logPath", ""):
            yield from ((rule["reason"], rule["pattern"]) for rule in content["rules"])


def _of_nvsentinel(clone: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(clone.glob("health-monitors/syslog-health-monitor/pkg/nicdriver/config.go")):
        text = file.read_text(encoding="utf-8")
        prefix = "".join(re.findall(r"const efaPrefix = `([^`]+)`", text))
        for name, code in re.findall(r'^\t"?(\w+)"?: \{\n(.*?)isFatal', text, re.DOTALL | re.MULTILINE):
            yield name, (prefix if "efaPrefix" in code else "") + "".join(_QUOTED.findall(code))


_PATTERNS: Mapping[str, Callable[[Path], Iterator[tuple[str, str]]]] = {
    "gpud": _of_gpud,
    "node-problem-detector": _of_node_problem_detector,
    "NVSentinel": _of_nvsentinel,
}
