"""The reference pages under docs/, made from the code: commands, settings, metrics, alerts, runbooks and others."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from opsd import config, exitcodes
from opsd.agent.metrics import COST, OPENED
from opsd.agent.web.app import API
from opsd.agent.web.exposition import LABEL
from opsd.collectors.base import Metric
from opsd.collectors.lib.kernel.xid import TOTAL
from opsd.commands import main
from opsd.commands.metrics import catalogue, label_values
from opsd.commands.options import EXIT_CODES, SectionedCommand, sections_of
from opsd.events import OF_LAUNCHERS, OF_RANKS, OF_RUNS, name_of
from opsd.launch.claims.messages import MESSAGES
from opsd.launch.io import protocol
from opsd.launch.io.handshake import OLDEST, VERSION
from opsd.runbooks.lib.guides import guides
from opsd.trainer.config import Config as TrainerConfig

FOLDER = Path(__file__).parents[1] / "docs"
NOTE = "<!-- Made by `make generate`; a change made here is lost. -->\n"


def rendered(folder: Path = FOLDER) -> dict[Path, str]:
    """File and content of every page."""
    pages = {
        "metrics.md": _metrics(),
        "settings.md": _settings(),
        "trainer-settings.md": _trainer_settings(),
        "commands.md": _commands(),
        "exit-codes.md": _exit_codes(),
        "messages.md": _messages(),
        "alerts.md": _alerts(),
        "api.md": _api(),
        "events.md": _events(),
        "runbooks/README.md": _runbooks(),
    }
    return {folder / name: NOTE + "\n" + text for name, text in pages.items()}


def leftovers(folder: Path = FOLDER) -> list[Path]:
    """Pages that were made from something that is gone."""
    wanted = rendered(folder).keys()
    made = (path for path in sorted(folder.rglob("*.md")) if path.read_text(encoding="utf-8").startswith(NOTE))
    return [path for path in made if path not in wanted]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(columns), "|" + "---|" * len(columns), *map(line, rows)]) + "\n"


def _metrics() -> str:
    rows = [
        (f"`{metric.name}`", metric.kind, metric.unit, ", ".join(metric.labels), metric.help, source)
        for source, metric in sorted(catalogue(), key=lambda entry: entry[1].name)
    ]
    labels = _table(("label", "values"), [(f"`{name}`", values) for name, values in label_values().items()])
    return (
        "# Metrics\n\nWhat the agent exports at `/metrics`; `opsd metrics --list` prints the same.\n\n"
        f"In OpenMetrics, {_names(OPENED, COST, TOTAL)} have exemplars. The label `{LABEL}` is the id of the newest "
        "incident that the series counts. Prometheus keeps them with `--enable-feature=exemplar-storage`; the page of "
        "the incident is `/incident/ID` at the agent.\n\n"
        + _table(("name", "type", "unit", "labels", "meaning", "source"), rows)
        + "\n## What labels hold\n\n"
        + labels
    )


def _names(*metrics: Metric) -> str:
    *names, last = (f"`{metric.name}`" for metric in metrics)
    return f"{', '.join(names)} and {last}"


def _settings() -> str:
    parts = [
        "# Settings\n\nOf `/etc/opsd/opsd.toml`, which may be empty or missing; `opsd config init` writes one with "
        "every setting, `opsd config check` tells whether it is good.\n"
    ]
    for section, model in config.sections():
        rows = []
        for key, field in model.model_fields.items():
            fixed = field.default is not None and field.default_factory is None
            default = f"`{config.literal(field.default)}`" if fixed else ""
            rows.append((f"`{key}`", default, field.description or ""))
        parts.append(f"\n## [{section}]\n\n{config.summary(model)}\n\n" + _table(("key", "default", "meaning"), rows))
    return "".join(parts)


def _trainer_settings() -> str:
    parts = [
        "# Settings of the trainer\n\nOf the file that `opsd train` gets, and of `--set section.key=value`. Settings "
        "without a default have to be given.\n"
    ]
    for section, field in TrainerConfig.model_fields.items():
        model = field.annotation
        assert isinstance(model, type) and issubclass(model, BaseModel)
        said = field_docs(model)
        rows = [
            (
                f"`{key}`",
                "" if field.is_required() else f"`{config.literal(field.default)}`",
                _choices(field) + said[key],
            )
            for key, field in model.model_fields.items()
        ]
        about = inspect.cleandoc(model.__doc__ or "").replace("``", "`")
        parts.append(f"\n## [{section}]\n\n{about}\n\n" + _table(("key", "default", "meaning"), rows))
    return "".join(parts)


def _choices(field: FieldInfo) -> str:
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return f"One of {', '.join(f'`{choice}`' for choice in choices)}. " if choices else ""


def attribute_docs(module: ModuleType) -> dict[str, str]:
    """What the strings below the annotated assignments of a module say, by name; "" where there is none."""
    return _attribute_docs(ast.parse(inspect.getsource(module)).body)


def field_docs(kind: type) -> dict[str, str]:
    """What the strings below the fields of a class say, by name; "" where there is none."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef))
    return _attribute_docs(body)


def _attribute_docs(body: Sequence[ast.stmt]) -> dict[str, str]:
    """What the strings below assignments say, by name; "" where there is none."""
    found = {}
    for statement, after in zip_longest(body, body[1:]):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            said = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            found[statement.target.id] = " ".join(str(said).split()).replace("``", "`")
    return found


def _exit_codes() -> str:
    rows = [(str(getattr(exitcodes, name)), text or "Done.") for name, text in attribute_docs(exitcodes).items()]
    return "# Exit codes\n\nOf every command.\n\n" + _table(("code", "meaning"), rows)


def _commands() -> str:
    parts = ["# Commands\n\nEach says the same with `--help`. [Exit codes](exit-codes.md) are the same for all.\n"]
    with click.Context(main.cli, info_name="opsd") as root:
        for name in main.cli.list_commands(root):
            command = main.cli.get_command(root, name)
            assert command is not None
            note = "For the development of opsd, in a checkout.\n\n" if name in main.CHECKOUT_ONLY else ""
            parts += _command(command, click.Context(command, root, name), 2, note)
    return "".join(parts)


def _command(command: click.Command, context: click.Context, level: int, note: str = "") -> Iterator[str]:
    """The sections of a command and of those below it."""
    about = inspect.cleandoc(command.help or "").replace("\b\n", "").replace("<", "\\<")
    usage = f"{context.command_path} {' '.join(command.collect_usage_pieces(context))}"
    yield f"\n{'#' * level} {context.command_path}\n\n{note}{about}\n\n```\n{usage}\n```\n"
    for title, parameters in sections_of(command, context):
        options = [
            record for each in parameters if (record := each.get_help_record(context)) and "--help" not in each.opts
        ]
        if options:
            yield f"\n{title}:\n" if isinstance(command, SectionedCommand) else ""
            yield "\n" + _table(("option", "meaning"), [(f"`{names}`", said) for names, said in options])
    if rows := exit_codes(command):
        yield "\n" + _table(("exit code", "meaning"), rows)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _command(below, click.Context(below, context, name), level + 1)


def exit_codes(command: click.Command) -> list[tuple[str, str]]:
    """The table at the end of its help."""
    _, heading, table = (command.epilog or "").partition(f"\b\n{EXIT_CODES}\n")
    rows = re.findall(r"^  (\d+) +(.+(?:\n {7}.+)*)", table, re.MULTILINE) if heading else []
    return [(code, " ".join(said.split())) for code, said in rows]


def _messages() -> str:
    return (
        f"# Messages between launchers\n\nVersion {VERSION}; a launcher talks with those of the versions "
        f"{max(OLDEST, VERSION - 1)} to {VERSION + 1}. Messages are JSON with the name of their kind; fields that a "
        "launcher does not know are ignored, and those that have a default (`=`) may be missing.\n\n"
        + _table(("message", "direction", "fields", "meaning"), protocol.rows(MESSAGES))
    )


def _api() -> str:
    rows = [
        (f"`{route.path}`", " ".join(f"`{p.name}`: {p.about}" for p in route.parameters), route.about) for route in API
    ]
    return (
        "# HTTP API of the agent\n\nEvery answer is JSON. The agent serves an OpenAPI 3.1 description at "
        "`/api/v1/openapi.json`, with the fields of each answer. "
        "[The file](https://github.com/opsd/opsd/blob/main/opsd/agent/web/openapi.json) is in the repository too. "
        "It is made from the table of routes, and tests compare it with the answers. Numbers that JSON does not have "
        '(NaN, infinity) are null. A refusal is `{"error": …}`. Later releases may add fields.\n\n'
        + _table(("path", "parameters", "answer"), rows)
    )


def _events() -> str:
    parts = [
        "# Events of a run\n\n`events.jsonl` has one JSON object a line. Each has `t` (epoch seconds), `event`, "
        "`generation`, `run` and `node`. [The JSON Schema](schemas/events.schema.json) is made from the same classes. "
        "Programs add events of other names with `Reporter.event`. Later releases may add events and fields.\n"
    ]
    groups = (
        (
            "Of launchers",
            "Each launcher writes them for its node, in shared memory. The leader writes them for the run.",
            OF_LAUNCHERS,
        ),
        ("Of runs on several nodes", "The leader writes them into the run folder, with its clock.", OF_RUNS),
        ("Of ranks", "The included trainer and adapters write them. Each has `rank` too.", OF_RANKS),
    )
    for title, about, events in groups:
        rows = [(f"`{name_of(event)}`", "; ".join(_event_fields(event)), _one_line(event)) for event in events]
        parts.append(f"\n## {title}\n\n{about}\n\n" + _table(("event", "fields", "meaning"), rows))
    parts.append(
        "\n`ranks` of `generation_started` are {rank, pid}. `error` is {type, message, where}. `flight_recorder` is "
        "{culprits, cause, confidence}. `ranks` of `hang_detected` are {rank, phase, stuck_s, process, step}.\n"
    )
    return "".join(parts)


def _event_fields(event: type) -> Iterator[str]:
    docs = field_docs(event)
    for name in event.__annotations__:
        yield f"`{name}`" + (f" ({text})" if (text := docs.get(name)) else "")


def _one_line(kind: type) -> str:
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split()).replace("``", "`")


def _alerts() -> str:
    from opsd.dashboards.alerts import alerts

    rows = [
        (
            f"[{alert.name}](runbooks/{alert.runbook}.md)",
            alert.severity or "of the incident",
            alert.hold,
            alert.annotations["description"],
        )
        for alert in alerts()
    ]
    return (
        "# Alerts\n\nThe rules are in `deploy/prometheus/rules`, the routes and messages in `deploy/alertmanager`. "
        "Each alert has a page of the same name.\n\n" + _table(("alert", "severity", "after", "meaning"), rows)
    )


def _runbooks() -> str:
    rows = [(f"[{name}]({name}.md)", guide.title) for name, guide in guides().items()]
    return "# Runbooks\n\n" + _table(("name", "title"), rows)
