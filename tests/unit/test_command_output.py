"""What commands print, numbers they take, and where they write."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from opsd import exitcodes
from opsd.commands.main import COMMANDS, GROUPS, cli
from opsd.commands.options import Finite, SectionedCommand
from opsd.progress import PLAIN_S, Lines, shown, tracked
from opsd.words import ranges

# What commands print, where they write it, and what the shell completes.


@pytest.mark.parametrize("command", [("bench", "client"), ("demo",)])
def test_a_result_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Nobody waits for minutes to be told that the folder for the results does not exist."""
    result = CliRunner().invoke(cli, [*command, "--json", str(tmp_path / "no" / "results.json")])
    assert result.exit_code == exitcodes.USAGE
    assert "No such file or directory" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["--version"], ["config", "nothing"]])
def test_a_command_ends_without_a_last_collection(words: list[str]) -> None:
    """All objects are out of the collector's sight by then: a job that gives way keeps its node 0.2 s less."""
    program = (
        "import atexit, gc, sys; atexit.register(lambda: print(gc.get_freeze_count() > 10_000)); "
        "from opsd.commands.main import main; main()"
    )
    ended = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines()[-1] == "True", ended.stderr


def test_a_reader_that_has_enough_is_no_answer() -> None:
    """As in `opsd config show | head -1`: neither 0, as a check would pass, nor 1, as if it had failed."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    for command in (["config", "show"], ["--help"]):
        ended = subprocess.run(
            [sys.executable, "-m", "opsd", *command], stdout=write_end, stderr=subprocess.PIPE, check=False
        )
        assert (ended.returncode, ended.stderr) == (exitcodes.UNREAD, b"")
    os.close(write_end)


def test_a_closed_output_is_no_answer() -> None:
    """As in `opsd config show >&-`. To close stdin or stderr does no harm."""
    for redirections, code in ((">&-", exitcodes.NO_SPACE), ("2>&-", exitcodes.OK), ("<&-", exitcodes.OK)):
        command = f'"{sys.executable}" -m opsd config show {redirections}'
        ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        assert ended.returncode == code
        assert ("open stdout" in ended.stderr) == (code != exitcodes.OK)


def test_a_terminal_of_few_characters_shows_what_it_can() -> None:
    """A runbook has dashes and lines that ASCII lacks."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "opsd", "runbook", "show", "gpu_xid"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (exitcodes.OK, "")
    assert "Xid" in ended.stdout


@pytest.mark.parametrize(("shell", "current"), [("bash", "2"), ("zsh", "2"), ("fish", "--max-re")])
def test_completion_is_printed_and_completes(shell: str, current: str) -> None:
    """The script calls back with the words so far, and what it is told then are subcommands and flags."""
    assert "_OPSD_COMPLETE" in CliRunner().invoke(cli, ["completion", shell]).output
    environment = {"_OPSD_COMPLETE": f"{shell}_complete", "COMP_WORDS": "opsd launch --max-re", "COMP_CWORD": current}
    command = [sys.executable, "-m", "opsd"]
    answer = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert "--max-restarts" in answer.stdout


def test_a_bug_is_not_taken_for_the_answer_no() -> None:
    """A prolog drains the node for that answer."""
    broken = "from opsd.commands import main as cli; cli.COMMANDS['broken'] = ''; cli.main()"
    answer = subprocess.run([sys.executable, "-c", broken, "broken"], capture_output=True, text=True, check=False)
    assert (answer.returncode, "opsd.commands.broken" in answer.stderr) == (exitcodes.BROKEN, True)


@pytest.mark.parametrize("group", [[], ["deploy"]])
def test_a_group_without_a_command_shows_its_help_once(group: list[str]) -> None:
    """Somebody who types it wants the list, and not the complaint that it is missing."""
    command = [sys.executable, "-m", "opsd", *group]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == exitcodes.USAGE
    assert answer.stderr.count("Usage:") == 1
    assert "opsd: Usage" not in answer.stderr


@pytest.mark.parametrize("command", [["runbook", "list"], ["--version"]])
def test_a_full_disk_below_the_output_is_a_sentence(command: list[str]) -> None:
    """Whether it is met while the command prints or at its end."""
    with Path("/dev/full").open("w") as full:
        answer = subprocess.run(
            [sys.executable, "-m", "opsd", *command], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert answer.returncode == exitcodes.NO_SPACE
    assert answer.stderr == "opsd: No space left on device: free some, or send the output elsewhere\n"


@pytest.mark.parametrize("error", ["ENOSPC", "EDQUOT"])
def test_a_full_disk_is_no_bug_in_opsd(error: str) -> None:
    """Wherever it is met; the sentence names the file."""
    full = (
        "import errno, os, sys, types, click; from opsd.commands import main as cli; cli.COMMANDS['full'] = '';"
        "m = sys.modules['opsd.commands.full'] = types.ModuleType('full'); m.__spec__ = cli.find_spec('opsd')\n"
        f"@click.command()\ndef full(): raise OSError(errno.{error}, os.strerror(errno.{error}), '/scratch/run')\n"
        "m.full = full; cli.main()"
    )
    answer = subprocess.run([sys.executable, "-c", full, "full"], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr.count("\n")) == (exitcodes.NO_SPACE, 1), answer.stderr
    assert answer.stderr.startswith("opsd: /scratch/run: ")


INTERRUPTED = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)
become = os.execv
os.execv = lambda *command: (os.kill(os.getpid(), signal.SIGINT), become(*command))
sys.meta_path.insert(0, Finder())
os.write(1, b"began ")
sys.argv[0] = "opsd"
from opsd.commands.main import main
main()
"""


@pytest.mark.parametrize(
    ("module", "command", "began"),
    [
        ("click", ["--version"], 1),
        ("opsd.slurm.port", ["data", "run", "x.py"], 1),
        ("rich.console", ["status"], 1),
        ("dill", ["data", "run", "x.py"], 1),
        ("", ["data", "run", "x.py"], 2),
    ],
    ids=["the list of commands", "a command", "a library", "one that catches all", "another start"],
)
def test_an_interrupt_while_modules_are_imported_is_a_sentence(module: str, command: list[str], began: int) -> None:
    """Also while the program starts once more, before any line of it runs."""
    program = [sys.executable, "-c", INTERRUPTED.replace("MODULE", repr(module)), *command]
    environment = {**os.environ, "PYTHONHASHSEED": "0" if began == 1 else "random"}
    answer = subprocess.run(program, capture_output=True, text=True, check=False, env=environment)
    assert (answer.returncode, answer.stderr) == (exitcodes.INTERRUPTED, "opsd: interrupted\n")
    assert answer.stdout == "began " * began


@pytest.mark.parametrize("columns", [40, 80, 132])
def test_the_list_of_metrics_fits_a_terminal(columns: int) -> None:
    """No line is longer than the terminal, nothing is cut, and each metric has its labels, unit, help and source."""
    listed = json.loads(CliRunner().invoke(cli, ["metrics", "--json"]).stdout)
    shown = on_terminal([sys.executable, "-m", "opsd", "metrics"], columns)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert max(map(len, lines)) <= columns and "…" not in shown
    text = re.sub(r"\s", "", "".join(lines))
    for metric in listed:
        labels = f"{{{','.join(metric['labels'])}}}" if metric["labels"] else ""
        facts = ",".join(filter(None, (metric["type"], metric["unit"], f"from {metric['source']}")))
        assert re.sub(r"\s", "", f"{metric['name']}{labels}{facts}{metric['help']}") in text


def on_terminal(command: list[str], columns: int) -> str:
    """What ``command`` prints on a terminal of this width."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (50, columns))
    environment = {**os.environ, "TERM": "xterm"} | dict.fromkeys(("COLUMNS", "LINES"), "")
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment):
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):  # EIO once the command has ended
            while chunk := os.read(master, 65536):
                shown += chunk
    os.close(master)
    return shown.decode()


def test_a_requeue_outside_a_job_says_so() -> None:
    """Not that an argument is missing that is optional."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    command = [sys.executable, "-m", "opsd", "requeue"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert answer.returncode == exitcodes.USAGE
    assert "opsd: this is not inside a Slurm job: name the job, as in `opsd requeue 4242`" in answer.stderr


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        (["runbook", "list", "--json"], {"name", "title", "needs"}),
        (["preflight", "list", "--json"], {"name", "title", "needs", "profiles"}),
        (["agent", "--once", "--format", "json"], {"collector", "state", "reason", "seconds", "series"}),
    ],
)
def test_lists_are_json_for_programs(command: list[str], keys: set[str]) -> None:
    """One array of objects with the same keys."""
    listed = json.loads(CliRunner().invoke(cli, command).stdout)
    assert listed and all(set(entry) == keys for entry in listed)


def test_a_table_in_a_pipe_has_a_record_a_line() -> None:
    """However long: for grep, not for eyes."""
    listed = CliRunner().invoke(cli, ["runbook", "list"]).stdout.splitlines()
    assert len(listed) == 1 + len(json.loads(CliRunner().invoke(cli, ["runbook", "list", "--json"]).stdout))


def test_every_command_stands_below_a_heading() -> None:
    """And below one only."""
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)


@pytest.mark.parametrize("name", ["launch", "preflight"])
def test_every_option_of_a_long_help_stands_below_a_heading(name: str) -> None:
    """One that is forgotten would be shown with --help; the first sentences of commands are not cut."""
    command = cli.get_command(click.Context(cli), name)
    assert isinstance(command, SectionedCommand)
    listed = CliRunner().invoke(cli, [name, "--help"]).output
    rest = listed.rpartition("\nOptions:\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"^  (?:-h, )?--([a-z-]+)", rest, re.MULTILINE)) <= {"config", "set", "help"}
    assert "..." not in listed.partition("\nCommands:\n")[2]


# Numbers on the command line: finite ones only, whichever command they are given to.


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NAME": "train"}


def options(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Parameter]]:
    """Every parameter of every command below ``command``, and the command's path."""
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            found = command.get_command(click.Context(command), name)
            assert found is not None
            yield from options(found, (*path, name))
    for parameter in command.params:
        yield path, parameter


FLOATS = [
    (path, parameter)
    for path, parameter in options(cli)
    if isinstance(parameter.type, click.types.FloatParamType | click.FloatRange)
]


@pytest.mark.parametrize(("path", "parameter"), FLOATS, ids=lambda value: getattr(value, "name", None))
def test_every_number_is_finite_and_in_a_range(path: tuple[str, ...], parameter: click.Parameter) -> None:
    """``nan`` is in every range to click, and ``inf`` in one without a maximum."""
    assert isinstance(parameter.type, Finite), f"{' '.join(path)} {parameter.name}"
    assert parameter.type.min is not None


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e999", "ten"])
@pytest.mark.parametrize(
    "line",
    ["slurm run --wait={} -- t.py", "launch --hang-limit={} t.py", "launch --monitor-interval={} t.py",
     "requeue 7 --limit={}", "swap n1 --timeout={}"],
)  # fmt: skip
def test_what_is_no_such_number_is_a_wrong_command_line(line: str, value: str) -> None:
    """One sentence that names the option and what was given."""
    done = CliRunner().invoke(cli, line.format(value).split(), env=JOB)
    assert done.exit_code == exitcodes.USAGE
    (said,) = [sentence for sentence in done.output.splitlines() if sentence.startswith("Error: ")]
    assert line.partition("={}")[0].split()[-1] in said
    assert f"'{value}'" in said or str(float(value)) in said


@pytest.mark.parametrize("value", ["²", "0", "-1", "1025"])
def test_digits_that_are_no_number_of_ranks(value: str) -> None:
    """A superscript is a digit to Python, and no number."""
    done = CliRunner().invoke(cli, ["launch", f"--nproc-per-node={value}", "t.py"])
    assert (done.exit_code, "is not a number of ranks" in done.output) == (exitcodes.USAGE, True), done.output


# Numbers as people read them.


@given(st.sets(st.integers(0, 300)))
def test_ranges_name_exactly_the_numbers(numbers: set[int]) -> None:
    """In order, each once."""
    parts = [part.split("–") for part in ranges(numbers, "–").split(", ") if part]
    assert [n for low, *high in parts for n in range(int(low), int(high[0] if high else low) + 1)] == sorted(numbers)


# Progress without a terminal is a line now and then, and none of work that ends soon.


def test_lines_have_share_and_time_left() -> None:
    """One every few seconds; without a total only what is done."""
    said: list[str] = []
    now = 0.0
    look = Lines("staging", "bytes", said.append, lambda: now)
    look(1_000_000_000, 4_000_000_000)
    now = PLAIN_S
    look(1_000_000_000, 4_000_000_000)
    look(1_000_000_001, 4_000_000_000)
    now = 2 * PLAIN_S
    look(4_000_000_000, 4_000_000_000)
    assert said == [
        "opsd: staging: 1.00 GB of 4.00 GB (25%), 15.0 s left",
        "opsd: staging: 4.00 GB of 4.00 GB (100%)",
    ]
    texts = Lines("evaluating wiki", "texts", said.append, lambda: now)
    now += PLAIN_S
    texts(1234, None)
    assert said[-1] == "opsd: evaluating wiki: 1,234 texts"


def test_work_that_ends_soon_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Neither a line nor control characters."""
    assert list(tracked(range(3), "evaluating", "items", 3)) == [0, 1, 2]
    with shown("tokenising") as look:
        look(1, 2)
    assert capfd.readouterr() == ("", "")
