"""What is made from the code is current."""

from __future__ import annotations

import pytest

pytest.importorskip("yaml")
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.commands.main import CHECKOUT_ONLY, COMMANDS
from opsd.commands.metrics import catalogue
from opsd.config import known_keys, sections
from opsd.runbooks.lib.guides import guides
from opsd.trainer.config import Config
from tests.generate import ROOT, leftovers, outdated
from tests.manpages import FOLDER as MAN
from tests.manpages import rendered as manual_pages
from tests.reference import FOLDER, rendered
from tests.reference import leftovers as stale_pages

# What is made from the code is current: rules, boards, reference pages, the example configuration, the metrics.


def test_everything_generated_is_current() -> None:
    """`make generate` writes it; look at the difference then."""
    stale = [str(path.relative_to(ROOT)) for path in (*outdated(), *leftovers())]
    assert not stale, f"run `make generate`: {', '.join(stale)}"


# The reference pages: current, complete, and without anything that is only true on the machine that made them.


@cache
def pages() -> dict[Path, str]:
    return rendered()


def text(name: str) -> str:
    return pages()[FOLDER / name]


def test_nothing_is_left_out() -> None:
    """Every metric, setting, command, exit code and runbook is on its page; settings of the trainer are explained."""
    assert [m.name for _, m in catalogue() if f"| `{m.name}` |" not in text("metrics.md")] == []
    settings = text("settings.md")
    assert [name for name, _ in sections() if f"## [{name}]" not in settings] == []
    assert [key for key in known_keys() if f"| `{key.partition('.')[2]}` |" not in settings] == []
    trainer = text("trainer-settings.md")
    assert [name for name in Config.model_fields if f"## [{name}]" not in trainer] == []
    assert re.findall(r"^\| `(\w+)` \| [^|]* \|  \|$", trainer, re.MULTILINE) == []
    assert [name for name in COMMANDS if f"\n## opsd {name}\n" not in text("commands.md")] == []
    codes = {value for name, value in vars(exitcodes).items() if name.isupper()}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text("exit-codes.md"), re.MULTILINE)} == codes
    assert [name for name in guides() if f"({name}.md)" not in text("runbooks/README.md")] == []


def test_nothing_depends_on_the_machine() -> None:
    """Neither home folders nor host names."""
    whole = "".join(pages().values())
    assert str(Path.home()) + "/" not in whole
    assert str(FOLDER.parent) not in whole


def test_a_page_of_what_is_gone_is_left_over(tmp_path: Path) -> None:
    """Pages that were written by hand are not."""
    (tmp_path / "runbooks").mkdir()
    gone = tmp_path / "runbooks" / "gone.md"
    gone.write_text(text("runbooks/README.md"))
    (tmp_path / "own.md").write_text("# Mine\n")
    assert stale_pages(tmp_path) == [gone]


def test_the_index_names_every_command() -> None:
    """Nobody has to guess what there is."""
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    missing = [name for name in COMMANDS if not re.search(rf"`(opsd )?{name}\b", index)]
    assert missing == []


# Manual pages: groff and man take them, and they say what the command line says.


def test_each_command_has_one() -> None:
    """And those for the development of opsd have none."""
    assert {path.stem for path in manual_pages()} == {"opsd", *(f"opsd-{name}" for name in {*COMMANDS} - CHECKOUT_ONLY)}


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_has_no_complaint_and_loses_nothing() -> None:
    """Backslashes, dots at the start of a line and characters beyond ASCII are roff's own affairs."""
    command = ["groff", "-man", "-ww", "-Tutf8", "-P-cbou", "-rLL=200n", *sorted(map(str, MAN.glob("*.1")))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    said = " ".join(done.stdout.split())
    for words in ("--nproc-per-node N|cpu|gpu|auto", "n1=ADDRESS,n2=…", "opsd chaos corrupt-checkpoint"):
        assert words in said
