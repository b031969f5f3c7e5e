"""Slurm's hostlists: ``n[1-3,007],login`` and the names they stand for.

Names keep their zero padding: ``n[008-011]`` is n008, n009, n010, n011. Several brackets in one name multiply, as in
Slurm: ``r[1-2]n[1-2]`` is r1n1, r1n2, r2n1, r2n2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice, product

MAX_HOSTS = 65_536
"""Slurm's own limit (MAX_SLURM_NODES in slurm.h); keeps a typing error from filling the memory."""

MAX_NAME = 253
"""Longest name of a host in the DNS."""

_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")
_NUMBERED = re.compile(r"(.*?)(\d{1,18})")


class HostlistError(ValueError):
    """The hostlist cannot be parsed; the message says why."""


def expand(hostlist: str) -> tuple[str, ...]:
    """The names in ``hostlist``, in its order, with duplicates. Raises HostlistError."""
    names: list[str] = []
    for item in _split(hostlist):
        choices = _choices(item, hostlist, MAX_HOSTS - len(names))
        names += ("".join(parts) for parts in product(*choices))
    return tuple(names)


def compress(names: Iterable[str]) -> str:
    """A short sorted hostlist of ``names`` without duplicates; names that differ in their last number are merged."""
    numbered: dict[tuple[str, int], set[int]] = {}
    plain: set[str] = set()
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is None:
            plain.add(name)
        else:
            prefix, digits = match.groups()
            padded = len(digits) if digits.startswith("0") else 0
            numbered.setdefault((prefix, padded), set()).add(int(digits))
    items = sorted(plain)
    for (prefix, width), numbers in sorted(_join_widths(numbered).items()):
        ranges = list(_ranges(sorted(numbers), width))
        alone = len(numbers) == 1
        items.append(prefix + ranges[0] if alone else f"{prefix}[{','.join(ranges)}]")
    return ",".join(items)


def compress_in_order(names: Iterable[str]) -> str:
    """A hostlist of ``names`` in their order, with duplicates; names that count up by one are merged."""

    def key(place_and_name: tuple[int, str]) -> tuple[str, int, int]:
        place, name = place_and_name
        match = _NUMBERED.fullmatch(name)
        return (match[1], len(match[2]), int(match[2]) - place) if match else (name, 0, place)

    items = []
    for (prefix, width, _), run in groupby(enumerate(names), key):
        (_, first), *others = run
        items.append(f"{prefix}[{first[-width:]}-{others[-1][1][-width:]}]" if others else first)
    return ",".join(items)


def _split(hostlist: str) -> Iterator[str]:
    """The parts between commas outside brackets."""
    depth, item = 0, ""
    for character in hostlist.strip():
        if character == "," and depth == 0:
            yield _checked(item, hostlist)
            item = ""
            continue
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise HostlistError(f"{_shown(hostlist)}: brackets do not match")
        item += character
    if depth:
        raise HostlistError(f"{_shown(hostlist)}: brackets do not match")
    if item or hostlist.strip():
        yield _checked(item, hostlist)


def _checked(item: str, hostlist: str) -> str:
    if not item or re.search(r"[\s/\x00]", item):
        raise HostlistError(f"{_shown(hostlist)}: a host name is empty or has a blank or slash in it")
    return item


def _choices(item: str, hostlist: str, most: int) -> list[Sequence[str]]:
    """What stands at each place of the names in ``item``, which are ``most`` at most; nothing longer is built first."""
    found: list[Sequence[str]] = []
    count = 1
    for index, part in enumerate(re.split(r"\[(.*?)\]", item)):
        found.append([part] if index % 2 == 0 else list(islice(_numbers(part, hostlist), most + 1)))
        count *= len(found[-1])
        if count > most:
            raise HostlistError(f"{_shown(hostlist)}: more than {MAX_HOSTS} hosts")
    if sum(len(parts[-1]) for parts in found) > MAX_NAME:
        raise HostlistError(f"{_shown(hostlist)}: the name of a host is longer than {MAX_NAME} characters")
    return found


def _numbers(ranges: str, hostlist: str) -> Iterator[str]:
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise HostlistError(f"{_shown(hostlist)}: [{ranges}] is not a list of numbers and ranges")
        first, last = match[1], match[2] or match[1]
        if not int(first) <= int(last) <= int(first) + MAX_HOSTS:
            raise HostlistError(f"{_shown(hostlist)}: the range {part} runs backwards or is too long")
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def _join_widths(numbered: dict[tuple[str, int], set[int]]) -> dict[tuple[str, int], set[int]]:
    """Merge numbers that fill their width (n100) with the padded ones of the same width (n099)."""
    joined = {key: set(numbers) for key, numbers in numbered.items() if key[1]}
    for (prefix, width), numbers in numbered.items():
        if width:
            continue
        for number in numbers:
            key = (prefix, len(str(number)))
            joined.setdefault(key if key in joined else (prefix, 0), set()).add(number)
    return joined


def _ranges(numbers: list[int], width: int) -> Iterator[str]:
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [str(number).zfill(width) for _, number in run]
        yield members[0] if len(members) == 1 else f"{members[0]}-{members[-1]}"


def _shown(hostlist: str) -> str:
    return f"hostlist {hostlist if len(hostlist) <= 60 else hostlist[:57] + '...'!r}"
