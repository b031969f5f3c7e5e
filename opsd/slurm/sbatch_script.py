"""The options in a batch script, read as sbatch reads them (22.05; newer names of options are known too). Pure.

sbatch takes words from lines that begin with ``#SBATCH`` or ``#SLURM``, up to the first command, and gives them to
getopt_long(3). So long names may be shortened, flags of one letter joined, and a word behind an option that needs a
value is that value. Options of plugins are not known here: their value is the next word if that is no option.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

MAX_BYTES = 4 << 20
"""``max_script_size`` of SchedulerParameters, unless it is set."""

_FLAGS = (
    "contiguous", "help", "hold", "ignore-pbs", "no-requeue", "overcommit", "oversubscribe", "parsable", "quiet",
    "reboot", "requeue", "spread-job", "stepmgr", "test-only", "usage", "use-min-nodes", "verbose", "version",
    "wait",
)  # fmt: skip
_MAY_HAVE_VALUE = (
    "exclusive", "get-user-env", "nice", "no-kill", "propagate",
)  # fmt: skip
"""Only as ``--nice=5``, never as the next word."""
_WITH_VALUE = (
    "account", "acctg-freq", "array", "batch", "bb", "bbf", "begin", "chdir", "cluster-constraint", "clusters",
    "comment", "constraint", "container", "container-id", "core-spec", "cores-per-socket", "cpu-freq",
    "cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot", "dependency", "distribution", "error", "exclude",
    "export", "export-file", "extra", "extra-node-info", "gid", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node",
    "gpus-per-socket", "gpus-per-task", "gres", "gres-flags", "hint", "input", "job-name", "kill-on-invalid-dep",
    "licenses", "mail-type", "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus",
    "network", "nodefile", "nodelist", "nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node",
    "ntasks-per-socket", "oom-kill-step", "open-mode", "output", "partition", "power", "prefer", "priority",
    "profile", "qos", "reservation", "resv-ports", "segment", "signal", "sockets-per-node", "switches",
    "tasks-per-node", "thread-spec", "threads-per-core", "time", "time-min", "tmp", "tres-bind", "tres-per-task",
    "uid", "wait-all-nodes", "wckey", "wrap",
)  # fmt: skip
_NAMES = (*_FLAGS, *_MAY_HAVE_VALUE, *_WITH_VALUE)
_LETTERS = {
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile", "G": "gpus",
    "H": "hold", "J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes", "O": "overcommit", "Q": "quiet",
    "S": "core-spec", "V": "version", "W": "wait", "a": "array", "b": "begin", "c": "cpus-per-task",
    "d": "dependency", "e": "error", "h": "help", "i": "input", "k": "no-kill", "m": "distribution", "n": "ntasks",
    "o": "output", "p": "partition", "q": "qos", "s": "oversubscribe", "t": "time", "v": "verbose", "w": "nodelist",
    "x": "exclude",
}  # fmt: skip
_ENVIRONMENT = {
    "SBATCH_NO_KILL": "no-kill", "SBATCH_NO_REQUEUE": "no-requeue", "SBATCH_OPEN_MODE": "open-mode",
    "SBATCH_REQUEUE": "requeue", "SBATCH_SIGNAL": "signal", "SBATCH_TIMELIMIT": "time",
}  # fmt: skip
"""Variables that sbatch takes for options; they count more than the script."""
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})", re.ASCII)
_BLANKS = " \t\v\f\r"


@dataclass(slots=True)
class Script:
    """The ``options`` by their long names without dashes, the last of each, and all values of ``signals``.

    ``refused`` says why sbatch does not take the script, "" if nothing speaks against it.
    """

    options: dict[str, str] = field(default_factory=dict)
    signals: list[str] = field(default_factory=list)
    heterogeneous: bool = False
    refused: str = ""

    def add(self, name: str, value: str) -> None:
        """Another option, which counts more than those before."""
        self.options.pop(name, None)
        self.options[name] = value
        if name == "signal":
            self.signals.append(value)

    def refuse(self, why: str) -> None:
        """The first reason counts."""
        self.refused = self.refused or why


def read_script(
    text: str, environ: Mapping[str, str] = MappingProxyType({}), line: Sequence[str] = (), *, whole: bool = True
) -> Script:
    """The options in a batch script, then those of variables in ``environ``, then those on sbatch's command ``line``.

    Whether sbatch takes the script is only looked at if it is ``whole``.
    """
    found = Script()
    if whole:
        found.refuse(_why_no_script(text))
    words: list[str] = []
    for directive in _directives(text):
        for word in _words(directive, found):
            if word in ("hetjob", "packjob"):
                found.heterogeneous = True
                break
            words.append(word)
    _take(words, found)
    for variable, name in _ENVIRONMENT.items():
        if variable in environ:
            found.add(name, environ[variable])
    _take(line, found, then_script=True)
    return found


def _why_no_script(text: str) -> str:
    if not text.strip():
        return "it is empty"
    if len(text) > MAX_BYTES:
        return f"it has more than {MAX_BYTES >> 20} MB"
    if not text.startswith("#!"):
        return "its first line does not begin with #!"
    if "\0" in text:
        return "it has a NUL byte"
    return "its lines end as those of DOS; convert it with dos2unix" if "\r\n" in text else ""


def _directives(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        for word in ("#SBATCH", "#SLURM"):
            if line.startswith(word):
                yield line.removeprefix(word)
                break
        else:
            if line.strip(_BLANKS) and not line.lstrip(_BLANKS).startswith("#"):
                return


def _words(line: str, found: Script) -> list[str]:
    """A backslash takes the next character as it is; ``#`` begins a comment, also within a word; "" is no word."""
    words, letters, quote, escaped = list[str](), list[str](), "", False
    for character in line:
        if escaped or (quote and character not in (quote, "\\")):
            letters.append(character)
            escaped = False
        elif character == "\\":
            escaped = True
        elif character in "\"'":
            quote = "" if quote else character
        elif character == "#":
            break
        elif character in _BLANKS:
            words.append("".join(letters))
            letters.clear()
        else:
            letters.append(character)
    if quote:
        found.refuse(f"a quotation mark has no second one in #SBATCH{line}"[:200])
    return [word for word in (*words, "".join(letters)) if word]


def _take(words: Sequence[str], found: Script, *, then_script: bool = False) -> None:
    """As getopt_long does. The first word that is no option is the ``then_script``, or else a mistake."""
    left = [*reversed(words)]
    while left:
        word = left.pop()
        if word.startswith("--") and len(word) > 2:
            _take_long(word[2:], left, found)
        elif word.startswith("-") and word not in ("-", "--"):
            _take_letters(word[1:], left, found)
        else:
            rest = [word, *reversed(left)] if word != "--" else left[::-1]
            if rest and not then_script:
                found.refuse(f"{rest[0]} is no option")
            return


def _take_long(text: str, left: list[str], found: Script) -> None:
    short, equals, value = text.partition("=")
    names = [short] if short in _NAMES else [name for name in _NAMES if name.startswith(short)]
    if len(names) > 1:
        found.refuse(f"--{short} may be {' or '.join(f'--{name}' for name in names)}")
        return
    name = names[0] if names else short
    if name in _FLAGS and equals:
        found.refuse(f"--{name} takes no value")
    elif name in _WITH_VALUE and not equals:
        if not left:
            found.refuse(f"--{name} lacks its value")
            return
        value = left.pop()
    elif not names and not equals and left and not left[-1].startswith("-"):
        value = left.pop()
    _add(name, value, found)


def _take_letters(text: str, left: list[str], found: Script) -> None:
    for at, letter in enumerate(text, 1):
        name = _LETTERS.get(letter)
        if name is None:
            found.refuse(f"-{letter} is no option of sbatch")
            return
        if name in _FLAGS:
            _add(name, "", found)
            continue
        value = text[at:]
        if not value and name in _WITH_VALUE:
            if not left:
                found.refuse(f"-{letter} lacks its value")
                return
            value = left.pop()
        _add(name, value, found)
        return


def _add(name: str, value: str, found: Script) -> None:
    if name == "no-kill" and value.lower() not in ("", "set", "off", "no"):
        found.refuse(f"--no-kill={value} is neither --no-kill nor --no-kill=off")
    found.add(name, value)


def seconds_of(text: str) -> float | None:
    """A time limit in Slurm's format: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:...]."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    parts = [int(part) for part in match["parts"].split(":")]
    if match["days"]:
        return int(match["days"]) * 86_400.0 + _summed(parts, (3600, 60, 1))
    return _summed(parts, {1: (60,), 2: (60, 1), 3: (3600, 60, 1)}[len(parts)])


def _summed(parts: Sequence[int], units: Sequence[int]) -> float:
    return float(sum(part * unit for part, unit in zip(parts, units, strict=False)))


@dataclass(frozen=True, slots=True)
class Signal:
    """What several ``--signal`` ask for together: the flags of all of them, signal and notice of the last.

    ``number`` is None if sbatch does not take it. ``notice_s`` is in seconds before the time limit.
    """

    text: str
    number: int | None
    notice_s: int
    script_alone: bool


_SIGNALS = {
    "HUP": 1, "INT": 2, "QUIT": 3, "ABRT": 6, "KILL": 9, "USR1": 10, "ALRM": 14, "USR2": 12, "TERM": 15, "CONT": 18,
    "STOP": 19, "TSTP": 20, "TTIN": 21, "TTOU": 22, "URG": 23, "XCPU": 24,
}  # fmt: skip
_SIGNAL = re.compile(
    r"(?:(?P<who>B|R|BR|RB):)?(?:(?:SIG)?(?P<name>[A-Z]+\d*)|(?P<number>\d+))(?:@(?P<notice>\d{1,6}))?", re.I | re.ASCII
)
_MOST_NOTICE_S, _USUAL_NOTICE_S, _LAST_SIGNAL = 0xFFFF, 60, 64


def signal_of(values: Sequence[str]) -> Signal | None:
    """The signal that sbatch asks for with these values of ``--signal``; None without any."""
    if not values:
        return None
    found = [_SIGNAL.fullmatch(value) for value in values]
    alone = any("B" in (match["who"] or "").upper() for match in found if match)
    last = found[-1]
    if last is None:
        return Signal(values[-1], None, 0, alone)
    number = int(last["number"]) if last["number"] else _SIGNALS.get(last["name"].upper(), 0)
    notice = int(last["notice"]) if last["notice"] else _USUAL_NOTICE_S
    is_taken = 1 <= number <= _LAST_SIGNAL and notice <= _MOST_NOTICE_S
    return Signal(values[-1], number if is_taken else None, notice, alone)
