"""Whoever writes an event builds its fields by the class of its name, so that schema and documentation are true."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.fakes.events import EVENTS

ROOT = Path(__file__).parents[2]
BY_VERB = {"checkpoint_uploaded", "checkpoint_fetched", "checkpoint_upload_failed", "checkpoint_fetch_failed"}
BY_FUNCTION = {"hang_detected", "straggler_found", "straggler_gone", "spare_joined", "segment_split", "evaluation"}
"""Their fields are the typed result of a function, or a line that an evaluation has written."""


def written() -> Iterator[tuple[str, str, str]]:
    """Place, name and class of each call that writes an event by name; the class is "" where it is not named there."""
    folders = [ROOT / "opsd/launch", ROOT / "opsd/adapters", ROOT / "opsd/checkpoints", ROOT / "trainer"]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            for name, kind in _written(function):
                yield f"{path.name}:{function.name}", name, kind


def _written(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    built = {
        node.targets[0].id: _called(node.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call)
    }
    for call in calls:
        names = [arg.value for arg in call.args[:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        if names and _called(call) in ("emit", "event", "append_event"):
            fields = next((word.value for word in call.keywords if word.arg is None), None)
            kind = _called(fields) if isinstance(fields, ast.Call) else built.get(getattr(fields, "id", ""), "")
            yield names[0], kind


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def test_fields_are_built_by_the_class_of_the_event() -> None:
    """And each event of opsd is written somewhere."""
    found = [*written()]
    assert len(found) > 30
    for place, name, kind in found:
        assert kind == EVENTS[name].__name__ or (name in BY_FUNCTION and not kind), f"{place}: {name} by {kind or '?'}"
    assert {name for _, name, _ in found} | BY_VERB | BY_FUNCTION == EVENTS.keys()
