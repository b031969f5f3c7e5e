"""A folder of flight recorder dumps, from whatever program: one file a rank, with the rank in its name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

from opsd.collectors.lib.nccl.flight_recorder import Dump, DumpError, parse_dump

MAX_FILE: Final = 256 << 20
_RANK: Final = re.compile(r"(?!\.)(?:.*\D)?(\d{1,7})(?:\.[a-z]\w*)?", re.ASCII)


class DumpFolder(NamedTuple):
    """The dumps by rank, and why each other file with a rank in its name could not be used."""

    dumps: dict[int, Dump]
    unusable: dict[str, str]


def read_dumps(folder: Path) -> DumpFolder:
    """The dumps in ``folder``: the last number in a file's name is the rank, as in ``nccl_trace_rank_3``.

    Raises OSError if the folder cannot be read, and DumpError if two dumps are of one rank.
    """
    found, files = DumpFolder({}, {}), dict[int, str]()
    for path in sorted(folder.iterdir()):
        match = _RANK.fullmatch(path.name)
        if match is None or not path.is_file():
            continue
        rank = int(match[1])
        try:
            dump = parse_dump(_read(path))
        except (DumpError, OSError) as error:
            found.unusable[path.name] = str(error)
            continue
        if rank in files:
            raise DumpError(f"{files[rank]} and {path.name} are both of rank {rank}; dumps of one hang are judged")
        files[rank], found.dumps[rank] = path.name, dump
    return found


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MAX_FILE + 1)
    if len(content) > MAX_FILE:
        raise DumpError(f"larger than {MAX_FILE >> 20} MiB")
    return content
