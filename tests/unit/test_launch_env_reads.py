"""Which environment variables an import has read, so that a standby is not used where it would have read others."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from opsd.launch.ranks.env_reads import EnvironmentReads

NAMES = ("MASTER_PORT", "RANK")


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """``MASTER_PORT`` is known, ``RANK`` is not."""
    before = dict(os.environ)
    os.environ["MASTER_PORT"] = "29500"
    os.environ.pop("RANK", None)
    yield
    os.environ.clear()
    os.environ.update(before)


def read_by(code: str) -> list[str]:
    """What the code of a module reads out of ``NAMES``; what it keeps is kept."""
    module: dict[str, Any] = {"__name__": "module"}
    with EnvironmentReads(NAMES) as reads:
        exec(f"import os, subprocess\n{code}", module)
        os.environ["KEPT"] = "yes"
    assert os.environ["KEPT"] == os.getenv("KEPT") == "yes"
    assert os.environb[b"KEPT"] == b"yes"
    return reads.names


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("os.environ['HOME']", []),
        ("x = os.environ['MASTER_PORT']", ["MASTER_PORT"]),
        ("os.getenv('MASTER_PORT')", ["MASTER_PORT"]),
        ("int(os.environ.get('RANK', '0'))", ["RANK"]),
        ("'RANK' in os.environ", ["RANK"]),
        ("os.environb.get(b'RANK')", ["RANK"]),
        ("os.environ.setdefault('RANK', '0')", ["RANK"]),
        ("os.path.expandvars('$MASTER_PORT')", ["MASTER_PORT"]),
        ("x = os.environ.copy()", ["MASTER_PORT"]),
        ("x = {**os.environ}", ["MASTER_PORT"]),
        ("x = dict(os.environ.items())", ["MASTER_PORT"]),
        ("x = [v for k, v in os.environ.items() if k.startswith('MASTER')]", ["MASTER_PORT"]),
        ("x = {k: v for k, v in os.environ.items() if k.startswith('TQDM_')}", []),
        ("def f():\n    found = dict(os.environ)\n    return found['HOME']\nx = f()", []),
        ("def f():\n    found = dict(os.environ)\n    return int(found['MASTER_PORT'])\nx = f()", ["MASTER_PORT"]),
        ("def f():\n    return 'at ' + os.environ.copy()['MASTER_PORT']\nx = f()", ["MASTER_PORT"]),
        ("def f():\n    return os.environ.copy()['MASTER_PORT'].split('x')\nx = f()", ["MASTER_PORT"]),
        ("def f():\n    return f\"{dict(os.environ)['MASTER_PORT']}\"\nx = f()", ["MASTER_PORT"]),
        ("for name in os.environ:\n    os.environ[name]", ["MASTER_PORT"]),
        ("x = list(os.environ)", []),
        ("subprocess.run(['true'], env=None)", []),
    ],
)
def test_reads(code: str, expected: list[str]) -> None:
    """Asking for a variable is reading it, set or not; looking for a prefix among all of them is not."""
    assert read_by(code) == expected


def test_values_are_what_they_were() -> None:
    """The code sees no difference, and afterwards there is none."""
    before = dict(os.environ)
    with EnvironmentReads(NAMES):
        inside = dict(os.environ.items())
        assert os.environ["MASTER_PORT"] == "29500"
        assert subprocess.run(["printenv", "MASTER_PORT"], capture_output=True, text=True).stdout == "29500\n"
        with pytest.raises(KeyError, match="RANK"):
            os.environ["RANK"]
    assert inside == before == dict(os.environ)
    assert type(os.environ._data) is dict  # type: ignore[attr-defined]
