"""Fixtures that several unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.cluster import FollowerLauncher
from tests.fakes.leader import NODES
from tests.fakes.webhook import Webhook


@pytest.fixture
def follower() -> FollowerLauncher:
    """One of three that train."""
    follower = FollowerLauncher()
    follower.begin(1, *NODES)
    return follower


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    """It ends with the test."""
    with Webhook() as server:
        yield server
        server.shutdown()
