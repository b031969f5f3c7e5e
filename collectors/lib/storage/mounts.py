"""What is mounted where, and how its NFS servers answer: parsers of /proc/PID/mountinfo and mountstats. Pure.

Formats: proc_pid_mountinfo(5), proc_pid_mountstats(5) and net/sunrpc/stats.c of the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from opsd.collectors.lib.processes import read_kernel_text

MAX_MOUNTS: Final = 64
"""What collectors export at most."""
NETWORK_TYPES: Final = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "panfs", "pvfs2", "smb3",
        "virtiofs", "wekafs",
    }
)  # fmt: skip
"""File systems that wait for another machine. Those of FUSE (``fuse.*``) count too, they wait for a process."""

DISK_TYPES: Final = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "xfs", "zfs"})

NFS_OPERATIONS: Final = ("READ", "WRITE", "COMMIT", "OPEN", "LOOKUP", "GETATTR", "READDIR")

_MAX_OPTIONS: Final = 256
_OCTAL = re.compile(r"\\([0-3][0-7]{2})")


class Mount(NamedTuple):
    """A mount. ``device`` is "major:minor", ``options`` those of the mount and of the file system, with commas.

    ``read_only`` is the file system. A mount can be so for one namespace alone, and for a service that systemd protects
    all of them are.
    """

    device: str
    point: str
    fstype: str
    source: str
    options: str
    read_only: bool

    @property
    def network(self) -> bool:
        """True if what is in it can wait for another machine or process."""
        return self.fstype in NETWORK_TYPES or self._fuse

    @property
    def by_user(self) -> bool:
        """True if an ordinary user may have mounted it, as with fusermount3(1): the kernel writes who."""
        owners = [option for option in self.options.split(",") if option.startswith("user_id=")]
        return self._fuse and bool(owners) and owners != ["user_id=0"]

    @property
    def _fuse(self) -> bool:
        return self.fstype.partition(".")[0] in ("fuse", "fuseblk")


class NfsOperation(NamedTuple):
    """Running totals of one NFS operation on one mount, in seconds where not a count.

    ``sent`` counts transmissions, which are more than ``calls`` where requests were repeated; ``round_trip_s`` is what
    server and network took, ``total_s`` what the caller waited.
    """

    name: str
    calls: int
    sent: int
    timeouts: int
    round_trip_s: float
    total_s: float


class NfsMount(NamedTuple):
    """The traffic of an NFS mount; ``read`` and ``written`` are bytes from and to the server."""

    point: str
    read: int
    written: int
    operations: tuple[NfsOperation, ...]


def parse_mountinfo(text: str) -> list[Mount]:
    """The mounts in the order in which they were made; lines that make no sense are left out."""
    return [mount for line in text.split("\n") if (mount := _mount(line)) is not None]


def _mount(line: str) -> Mount | None:
    left, separator, right = line.partition(" - ")
    fields, of_fs = left.split(" "), right.split(" ")
    if not separator or len(fields) < 6 or len(of_fs) < 3:
        return None
    options = list(dict.fromkeys((*fields[5].split(","), *of_fs[2].split(","))))
    return Mount(
        device=fields[2],
        point=_unescape(fields[4]),
        fstype=of_fs[0],
        source=_unescape(of_fs[1]),
        options=",".join(options)[:_MAX_OPTIONS],
        read_only="ro" in of_fs[2].split(","),
    )


def _unescape(text: str) -> str:
    """Space, tab, line feed and backslash are written as octal escapes."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def mount_of(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that ``path`` (absolute, without symbolic links) lies on; nothing is looked up on the disk."""
    found = None
    for mount in mounts:  # a later mount on the same point hides the earlier one
        inside = mount.point == "/" or path == mount.point or path.startswith(mount.point + "/")
        if inside and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def way_to(mount: Mount, mounts: Sequence[Mount]) -> list[Mount]:
    """The network mounts that the kernel looks through for the mount point, that of ``mount`` itself left out.

    They lie above it or, if they were made later, on it: users may mount a file system of their own on any folder of
    theirs. One at / is left out, as everything lies in it.
    """
    later = mounts[mounts.index(mount) + 1 :] if mount in mounts else ()
    return [
        *(m for m in mounts if m.network and m.point != "/" and mount.point.startswith(m.point + "/")),
        *(m for m in later if m.network and m.point == mount.point),
    ]


def storage_mounts(mounts: Sequence[Mount], paths: Iterable[str] = ()) -> list[Mount]:
    """The mounts that matter: disks, networks and those that ``paths`` lie on, each file system once.

    A file system mounted in several places is represented by the place with the shortest path. Those of users come
    last, so that no number of them leaves another one out.
    """
    wanted = {mount for path in paths if (mount := mount_of(path, mounts)) is not None}
    wanted |= {mount for mount in mounts if mount.fstype in DISK_TYPES or mount.network}
    once: dict[str, Mount] = {}
    for mount in sorted(wanted, key=lambda mount: (len(mount.point), mount.point)):
        once.setdefault(mount.device, mount)
    return sorted(once.values(), key=lambda mount: (mount.by_user, mount.point))


def read_mounts(proc: Path) -> list[Mount]:
    """All mounts of the running system. Raises OSError if ``proc`` is not there."""
    return parse_mountinfo(read_kernel_text(proc / "self/mountinfo"))


def parse_mountstats(text: str) -> list[NfsMount]:
    """The NFS mounts with their statistics; numbers that make no sense are left out."""
    found = []
    for block in re.split(r"^device ", text, flags=re.MULTILINE)[1:]:
        head, _, body = block.partition("\n")
        match = re.fullmatch(r"\S+ mounted on (\S+) with fstype nfs4? statvers=\S+", head.strip())
        if match is not None:
            read, written = _server_bytes(body)
            found.append(NfsMount(_unescape(match[1]), read, written, _operations(body)))
    return found


def _server_bytes(body: str) -> tuple[int, int]:
    """Fields 5 and 6 of the line "bytes:": what was read from and written to the server."""
    match = re.search(r"^\s*bytes:((?:\s+\d+){6})", body, re.MULTILINE | re.ASCII)
    if match is None:
        return 0, 0
    fields = match[1].split()
    return int(fields[4]), int(fields[5])


def _operations(body: str) -> tuple[NfsOperation, ...]:
    per_op = body.partition("per-op statistics")[2]
    found = []
    for name, numbers in re.findall(r"^\s*([A-Z_]+):((?:\s+\d+){8,9})\s*$", per_op, re.MULTILINE | re.ASCII):
        if name in NFS_OPERATIONS:
            calls, sent, timeouts, _, _, _, round_trip, total = (int(number) for number in numbers.split()[:8])
            found.append(NfsOperation(name, calls, sent, timeouts, round_trip / 1e3, total / 1e3))
    return tuple(found)
