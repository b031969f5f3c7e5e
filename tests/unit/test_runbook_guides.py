"""The guides of the runbooks, read as the person on call reads them."""

import re
from importlib import import_module
from pathlib import Path

import click
import pytest

from opsd import runbooks
from opsd.agent.actions import VERBS
from opsd.commands.main import cli
from opsd.commands.metrics import catalogue
from opsd.runbooks import RUNBOOKS
from opsd.runbooks.lib.guides import Guide, guides

FOLDER = Path(runbooks.__file__).parent
PROGRAMS = {
    "cat", "df", "findmnt", "grep", "iostat", "ibstat", "ipmitool", "journalctl", "kill", "ls", "nvidia-smi", "py-spy",
    "sacct", "scontrol", "smartctl", "squeue",
}  # fmt: skip
"""Programs that a guide may ask for besides opsd: they come with the distribution, the driver or Slurm."""

by_kind = pytest.mark.parametrize("runbook", RUNBOOKS, ids=lambda runbook: runbook.kind)


by_name = pytest.mark.parametrize("guide", [pytest.param(guide, id=name) for name, guide in guides().items()])


def commands(guide):
    """The commands on a guide: what stands in backticks and begins with the name of a program."""
    quoted = re.findall(
        r"`([^`]+)`", "\n".join((guide.diagnosis, guide.mitigation, guide.automatic)).replace("\n", " ")
    )
    return [re.sub(r"\s+", " ", text) for text in quoted if text.split()[0] in PROGRAMS | {"opsd"}]


def test_every_file_is_a_runbook_in_the_tuple_under_its_own_name():
    """One file per kind, and none forgotten."""
    modules = {path.stem: import_module(f"opsd.runbooks.{path.stem}") for path in FOLDER.glob("[a-z]*.py")}
    files = {name for name, module in modules.items() if hasattr(module, "RUNBOOK")}
    assert {runbook.kind for runbook in RUNBOOKS} == files


@by_name
def test_a_guide_says_what_opsd_does_in_each_mode(guide):
    """The person on call must know what the agent may already have done."""
    assert all(mode in guide.automatic for mode in ("observe", "recommend", "act"))


@by_kind
def test_a_guide_tells_what_to_type(runbook):
    """A diagnosis begins with the incident itself and has commands to go on with."""
    assert any(command.startswith("opsd incidents show") for command in commands(guides()[runbook.kind]))
    assert len({command.split()[0] for command in commands(guides()[runbook.kind])}) >= 2


@by_name
def test_opsd_commands_on_a_guide_exist(guide):
    """A command or an option that does not exist costs minutes at 3 a.m."""
    for command in commands(guide):
        if command.startswith("opsd "):
            group, context = cli, click.Context(cli)
            words = iter(command.split()[1:])
            for word in words:
                if word.startswith("-"):
                    option = next((o for o in group.params if word.partition("=")[0] in o.opts), None)
                    assert option is not None or word == "--help", f"{command}: no option {word}"
                    if option is not None and not option.is_flag and "=" not in word:
                        next(words)
                elif isinstance(group, click.Group):
                    group = group.get_command(context, word)
                    assert group is not None, f"{command}: no {word}"


@by_kind
def test_metrics_that_a_runbook_reads_are_exported(runbook):
    """A detector on a series that nobody writes would be silent for ever."""
    source = (FOLDER / f"{runbook.kind}.py").read_text(encoding="utf-8")
    exported = {metric.name for _, metric in catalogue()}
    read = set(re.findall(r'"((?:DCGM_FI|opsd)_\w+)"', source))
    assert read - exported == set()


@by_kind
def test_verbs_that_a_runbook_asks_for_exist(runbook):
    """An action that the executor does not know would fail when it is needed."""
    source = (FOLDER / f"{runbook.kind}.py").read_text(encoding="utf-8")
    assert set(re.findall(r'Action\(\s*"(\w+)"', source)) <= set(VERBS)


def test_a_guide_without_one_of_its_sections_is_refused():
    """A half guide is noticed when it is written, not when it is needed."""
    with pytest.raises(ValueError, match="Mitigation"):
        Guide.parse("# Title\n\n## Meaning\nx\n\n## Impact\ny\n")


def test_a_guide_is_parsed_into_its_sections():
    """The Markdown of the file is the guide."""
    text = "".join(f"\n## {head}\nabout {head}\n" for head in ("Meaning", "Impact", "Diagnosis", "Mitigation"))
    guide = Guide.parse(f"# Title\n{text}\n## What opsd does by itself\nnothing\n")
    assert (guide.title, guide.diagnosis, guide.automatic) == ("Title", "about Diagnosis", "nothing")
