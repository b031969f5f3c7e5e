"""Puts a plan's layout into a run's TOML file; comments and everything else stay as they are."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

_HEADER = re.compile(r"\s*\[+\s*([^\]\s]+)\s*\]+")


def with_settings(text: str, settings: Mapping[str, Any]) -> str:
    """``text`` with these settings, by ``section.key``. Raises ValueError if it cannot be changed so."""
    lines = text.splitlines()
    for name, value in settings.items():
        section, _, key = name.partition(".")
        _set(lines, section, key, f'"{value}"' if isinstance(value, str) else str(value))
    changed = "\n".join(lines) + "\n"
    expected = tomllib.loads(text)
    for name, value in settings.items():
        section, _, key = name.partition(".")
        expected.setdefault(section, {})[key] = value
    try:
        if tomllib.loads(changed) == expected:
            return changed
    except tomllib.TOMLDecodeError:
        pass
    raise ValueError("its sections are written in a way that cannot be changed line by line")


def _set(lines: list[str], section: str, key: str, value: str) -> None:
    begin = next((at for at, line in enumerate(lines) if _section(line) == section), None)
    if begin is None:
        lines += ["", f"[{section}]", f"{key} = {value}"]
        return
    end = next((at for at in range(begin + 1, len(lines)) if _section(lines[at])), len(lines))
    for at in range(begin + 1, end):
        if match := re.match(rf"(\s*{key}\s*=\s*)[^#]*?(\s*(?:#.*)?)$", lines[at]):
            lines[at] = f"{match[1]}{value}{match[2]}"
            return
    last = max(at for at in range(begin, end) if lines[at].strip())
    lines.insert(last + 1, f"{key} = {value}")


def _section(line: str) -> str | None:
    match = _HEADER.match(line)
    return match[1] if match else None
