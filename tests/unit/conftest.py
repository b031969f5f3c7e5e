"""Fixtures that several unit tests share."""

from __future__ import annotations

import pytest

from tests.fakes.cluster import FollowerLauncher
from tests.fakes.leader import NODES


@pytest.fixture
def follower() -> FollowerLauncher:
    """One of three that train."""
    follower = FollowerLauncher()
    follower.begin(1, *NODES)
    return follower
