"""Files that a user names are opened as the kernel would for that user."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from opsd.collectors.lib.rights import Rights, groups_of_process, open_as

ME, OTHER, GROUP = 4001, 4002, 5001
RIGHTS = Rights(ME, frozenset({GROUP}))

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A folder that everybody reaches."""
    folder = tmp_path / "top"
    folder.mkdir()
    for path in (folder, *folder.parents):
        if path.stat().st_uid == 0 and path != Path("/") and not path.stat().st_mode & 1:
            path.chmod(0o755)
    return folder


def put(path: Path, mode: int, owner: int = 0, group: int = 0) -> Path:
    path.write_text("content")
    os.chown(path, owner, group)
    path.chmod(mode)
    return path


def opens(path: Path | str, flags: int = os.O_RDONLY, rights: Rights = RIGHTS) -> bool:
    try:
        os.close(open_as(rights, str(path), flags))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("mode", "owner", "group", "may"),
    [
        (0o400, ME, 0, True), (0o044, ME, GROUP, False), (0o040, 0, GROUP, True), (0o604, 0, GROUP, False),
        (0o604, 0, 0, True), (0o640, OTHER, 0, False), (0o600, 0, 0, False),
    ],
)  # fmt: skip
def test_the_mode_decides(top: Path, mode: int, owner: int, group: int, may: bool) -> None:
    """The first of owner, group and others that applies, as in acl(5)."""
    assert opens(put(top / "file", mode, owner, group)) is may
    assert opens(top / "file", rights=Rights(0, frozenset()))


def test_every_folder_on_the_way_has_to_let_the_user_pass(top: Path) -> None:
    """By whatever path: links, also absolute ones, and dots lead nowhere else."""
    closed = top / "closed"
    closed.mkdir(mode=0o700)
    put(closed / "file", 0o644)
    (top / "link").symlink_to("closed/file")
    (top / "absolute").symlink_to(closed / "file")
    (top / "loop").symlink_to("loop")
    assert not any(opens(top / name) for name in ("closed/file", "link", "absolute", "loop", "closed/../open"))
    put(top / "open", 0o644)
    (closed / "out").symlink_to("../open")
    closed.chmod(0o711)
    assert all(opens(top / name) for name in ("closed/file", "link", "absolute", "closed/out", "closed/../open"))
    assert not opens(top / "link", os.O_RDONLY | os.O_NOFOLLOW)


def test_what_the_agent_has_open_is_no_way_in(top: Path) -> None:
    """Links of /proc are read as text."""
    with put(top / "secret", 0o600).open() as secret:
        assert not opens(f"/proc/self/fd/{secret.fileno()}")


@pytest.mark.parametrize(
    ("entries", "may"),
    [
        ([(0x02, 4, ME), (0x10, 4, 0)], True),
        ([(0x02, 4, ME), (0x10, 0, 0)], False),
        ([(0x02, 0, ME), (0x10, 7, 0)], False),
        ([(0x08, 4, GROUP), (0x10, 7, 0)], True),
        ([(0x08, 0, GROUP), (0x10, 7, 0)], False),
        ([(0x02, 4, OTHER), (0x10, 7, 0)], True),
    ],
)
def test_access_control_lists_decide(top: Path, entries: list[tuple[int, int, int]], may: bool) -> None:
    """A named user, then groups, then others; all but others through the mask."""
    path = put(top / "file", 0o604)
    every = sorted([*entries, (0x01, 6, 0xFFFFFFFF), (0x04, 0, 0xFFFFFFFF), (0x20, 4, 0xFFFFFFFF)])
    acl = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", tag, bits, who if tag in (0x02, 0x08) else 0xFFFFFFFF) for tag, bits, who in every
    )
    try:
        os.setxattr(path, "system.posix_acl_access", acl)
    except OSError as error:
        pytest.skip(f"no access control lists here: {error}")
    assert opens(path) is may


def test_groups_are_those_of_a_process_of_the_user() -> None:
    """Of no other user's."""
    assert groups_of_process(os.getpid(), os.getuid()) >= {os.getgid()}
    assert groups_of_process(os.getpid(), ME) == frozenset()
