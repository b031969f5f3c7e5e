"""Numbers and times as people read them. Pure."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Iterable
from itertools import pairwise

_MENTION = re.compile(r"@(?=channel|here|all|everyone)|(?<!\w)@(?=\w)", re.IGNORECASE)
"""Of everybody anywhere, of one person at the beginning of a word: an address of mail stays whole."""
_ERRNO = re.compile(r"\[Errno -?\d+\] ")
_REMEDIES = {
    errno.ENOSPC: "make room there, or choose another folder",
    errno.EDQUOT: "remove something of yours there, or choose another folder",
    errno.EROFS: "mount it for writing, or choose another folder",
    errno.EACCES: "give this user the right to write there, or choose another folder",
    errno.EIO: "the kernel log (`dmesg`) says why; then run it again",
    errno.ESTALE: "mount it again; then run it again",
}
_MARKUP = {0x3C: "‹", 0x3E: "›"}

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def duration(seconds: float) -> str:
    """``seconds`` in at most two units: 0.84 s, 12.3 s, 4 min 5 s, 3 h 12 min, 2 d 4 h."""
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    for (unit, name), (part, part_name) in pairwise(_UNITS):
        if whole >= unit:
            more = whole % unit // part
            return f"{whole // unit} {name} {more} {part_name}" if more else f"{whole // unit} {name}"
    return f"{whole} s"


def span(seconds: float) -> str:
    """``seconds`` without what nobody reads: 4 s, 12 min, 3 h 20 min, 2 d 4 h."""
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    if whole < 172_800:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def spans(*days: float) -> list[str]:
    """In days, or all in smaller units if none of them is one."""
    return [f"{each:.1f}" if max(days) >= 1 else duration(each * 86400) for each in days]


def count(number: float) -> str:
    """A count with separators, or shortened from ten million on: 250,000, 12.4 M, 3.21 B, 1.05 T."""
    for factor, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= (1e7 if name == "M" else factor):
            return f"{number / factor:.3g} {name}"
    return f"{number:,.0f}"


def size(number: float) -> str:
    """Bytes in powers of 1000, with three digits: 512 B, 40.1 kB, 3 MB, 12.5 GB, 1.2 TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def gpu_time(seconds: float) -> str:
    """GPU-seconds, from a tenth of an hour on GPU-hours: 84 GPU-seconds, 0.35 GPU-hours, 1,204.00 GPU-hours."""
    return f"{seconds:.0f} GPU-seconds" if seconds < 360 else f"{seconds / 3600:,.2f} GPU-hours"


def plural(number: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ranges(numbers: Iterable[int], dash: str = "-") -> str:
    """Numbers in ascending order with runs of them joined: 1, 2, 3 and 7 are "1-3, 7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}{dash}{high}" for low, high in runs)


def clock(at: float) -> str:
    """The epoch second ``at`` in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def reason(error: BaseException) -> str:
    """What ``error`` says, without the number and the file of one of the operating system."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return _ERRNO.sub("", said) or type(error).__name__  # libraries keep the number in texts of their own


def of_file(error: OSError) -> str:
    """What ``error`` says, with its file if it names one, and without the number."""
    return f"{error.filename}: {reason(error)}" if error.filename else reason(error)


def with_remedy(error: OSError) -> str:
    """``of_file``, and what to do about it as far as that is known."""
    return of_file(error) + remedy(error)


def remedy(error: OSError) -> str:
    """What to do about ``error``, after a semicolon; "" if that is not known."""
    known = _REMEDIES.get(error.errno or 0, "")
    return f"; {known}" if known else ""


def first_line(text: str, most: int = 300) -> str:
    """The first line of ``text``, shortened, without control characters."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    plain = printable(line)
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"


def printable(text: str) -> str:
    """``text`` on one line; what is not printable, as control characters and changes of direction, is a space."""
    return "".join(c if c.isprintable() else " " for c in text)


def unformatted(text: str, most: int = 2000) -> str:
    """``text`` for a chat, shortened and on one line: it names nobody to be alerted, and no link under other words.

    Angle brackets become quotation marks of that form: escaping them would show in some programs and not in others.
    """
    plain = _MENTION.sub("@ ", printable(text).translate(_MARKUP)).replace("](", "] (")
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"
