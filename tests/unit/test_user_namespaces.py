"""Whether user ids are those of the machine, or of a user namespace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opsd.rundir import in_user_namespace, machine_uid, unmapped_uid

ME = os.getuid()


@pytest.mark.parametrize(
    ("mapped", "inside", "uid"),
    [
        ("         0          0 4294967295\n", False, ME),
        (f"{ME} 5000 1\n", True, 5000),
        (f"4000000000 1 1\n{ME} 7000 10\n", True, 7000),
        ("4000000000 1 1\n", True, ME),
    ],
)
def test_a_map_of_user_ids_tells(tmp_path: Path, mapped: str, inside: bool, uid: int) -> None:
    """As the kernel writes it (user_namespaces(7)): first id inside, first one outside, how many."""
    (tmp_path / "uid_map").write_text(mapped)
    assert (in_user_namespace(tmp_path), machine_uid(tmp_path)) == (inside, uid)


def test_without_user_namespaces_ids_are_the_machines(tmp_path: Path) -> None:
    """A kernel can be built without them."""
    assert (in_user_namespace(tmp_path), machine_uid(tmp_path)) == (False, ME)


def test_users_without_an_id_have_a_number_in_a_namespace_only(tmp_path: Path) -> None:
    """65534 by default, and a user of that number outside one."""
    (tmp_path / "overflowuid").write_text("65534\n")
    assert unmapped_uid(tmp_path) == (65534 if in_user_namespace() else None)
