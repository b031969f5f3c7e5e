"""Settings that all tests share."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

from tests.fakes.tree import tmpfs

settings.register_profile("opsd", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("opsd")

# A shell ignores the first two for what it runs in the background, nohup the third, and programs under test would
# inherit that.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

OF_SEVERAL_RANKS = ("test_trainer", "test_preflight_train", "test_preflight_namespaces", "test_gpu", "test_bench_re")
"""Modules whose tests start several ranks of torch at once: two of them side by side take four times as long."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    with tmpfs(tmp_path / "disk", "size=1m") as disk:
        yield disk


def pytest_make_parametrize_id(val: object) -> str | None:
    """Cut the name of a case that is made of a long text: of a case of 8 MB each worker got a name of 30 MB."""
    if isinstance(val, str | bytes) and len(val) > 200:
        return ascii(val[:60])[:100] + f" and so on to {len(val)}"
    return None


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Have tests with several ranks run one after the other, beside all others."""
    for item in items:
        if item.path.parent.name != "unit" and item.path.name.startswith(OF_SEVERAL_RANKS):
            item.add_marker(pytest.mark.xdist_group("ranks"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse a pytest and a pytest-xdist that do not fit: groups would be torn apart without a word."""
    if getattr(session.config.option, "loadgroup", False):
        torn = [item for item in session.items if item.get_closest_marker("xdist_group") and "@" not in item.nodeid]
        if torn:
            raise pytest.UsageError("this pytest-xdist cannot group the tests of this pytest; see pyproject.toml")
