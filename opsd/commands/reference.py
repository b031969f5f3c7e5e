"""The reference pages under docs/, made from the code: metrics, settings, exit codes, messages, alerts, runbooks."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path

from opsd import config, exitcodes
from opsd.commands.metrics import catalogue, label_values
from opsd.commands.runbook import all_guides, to_markdown
from opsd.launch.claims.messages import MESSAGES
from opsd.launch.io import protocol
from opsd.launch.io.handshake import OLDEST, VERSION

FOLDER = Path(__file__).parents[2] / "docs"
NOTE = "<!-- Made by `opsd docs build`; a change made here is lost. -->\n"


def rendered(folder: Path = FOLDER) -> dict[Path, str]:
    """File and content of every page."""
    pages = {
        "metrics.md": _metrics(),
        "settings.md": _settings(),
        "exit-codes.md": _exit_codes(),
        "messages.md": _messages(),
        "alerts.md": _alerts(),
        "runbooks/README.md": _runbooks(),
        **{f"runbooks/{name}.md": to_markdown(guide) for name, guide in all_guides().items()},
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
        + _table(("name", "type", "unit", "labels", "meaning", "source"), rows)
        + "\n## What labels hold\n\n"
        + labels
    )


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


def _exit_codes() -> str:
    body = ast.parse(inspect.getsource(exitcodes)).body
    rows = []
    for index, statement in enumerate(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.value, ast.Constant):
            after = body[index + 1] if index + 1 < len(body) else None
            said = (
                after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else "Done."
            )
            rows.append((str(statement.value.value), " ".join(str(said).split())))
    return "# Exit codes\n\nOf every command.\n\n" + _table(("code", "meaning"), rows)


def _messages() -> str:
    return (
        f"# Messages between launchers\n\nVersion {VERSION}; a launcher talks with those of the versions "
        f"{max(OLDEST, VERSION - 1)} to {VERSION + 1}. Messages are JSON with the name of their kind; fields that a "
        "launcher does not know are ignored, and those that have a default (`=`) may be missing.\n\n"
        + _table(("message", "direction", "fields", "meaning"), protocol.rows(MESSAGES))
    )


def _alerts() -> str:
    from opsd.dashboards.alerts.build import alerts

    rows = [
        (
            f"[{alert.name}](runbooks/{alert.guide}.md)",
            alert.severity or "of the incident",
            alert.hold,
            alert.description,
        )
        for alert in alerts()
    ]
    return (
        "# Alerts\n\nThe rules are in `deploy/prometheus/rules`, the routes and messages in `deploy/alertmanager`. "
        "Each alert has a page of the same name.\n\n" + _table(("alert", "severity", "after", "meaning"), rows)
    )


def _runbooks() -> str:
    rows = [(f"[{name}]({name}.md)", guide.title) for name, guide in all_guides().items()]
    return "# Runbooks\n\n" + _table(("name", "title"), rows)
