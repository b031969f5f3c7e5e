"""What commands print, where they write it, and what the shell completes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from opsd import exitcodes
from opsd.commands.main import COMMANDS, GROUPS, cli
from opsd.commands.options import SectionedCommand


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
