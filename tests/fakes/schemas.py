"""Values and answers held against what users are promised.

Values held against the schemas that users get.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator

from opsd.events import OF_LAUNCHERS, OF_RANKS, OF_RUNS, name_of
from tests.schemas import FOLDER


def schema(name: str) -> dict[str, Any]:
    """A schema as it stands in the documentation."""
    return dict(json.loads((FOLDER / f"{name}.schema.json").read_text(encoding="utf-8")))


def errors(schema: Mapping[str, Any], value: object) -> list[str]:
    """What is wrong with ``value``."""
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(value)]


def strict(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema that refuses fields which it does not have; for events see ``unknown_fields``."""
    closed = copy.deepcopy(dict(schema))
    for definition in closed["$defs"].values():
        definition["additionalProperties"] = False
    return closed


# Answers of the agent, held against the description of its API.


class Description:
    """A description, read strictly: a field that it does not have is an error, too."""

    def __init__(self, text: str | bytes) -> None:
        self.document: dict[str, Any] = json.loads(text)
        for schema in self.document["components"]["schemas"].values():
            schema["additionalProperties"] = False

    @property
    def paths(self) -> list[str]:
        return [*self.document["paths"]]

    def errors(self, path: str, status: int, body: str | bytes) -> list[str]:
        """What is wrong with an answer of the route ``path``."""
        response = self.document["paths"][path]["get"]["responses"].get(str(status))
        if response is None:
            return [f"{path} does not answer with {status}"]
        if "$ref" in response:
            response = self.document["components"]["responses"][response["$ref"].rpartition("/")[2]]
        schema = response["content"]["application/json"]["schema"]
        validator = Draft202012Validator({**schema, "components": self.document["components"]})
        return [f"{path}: {e.json_path}: {e.message}" for e in validator.iter_errors(json.loads(body))]


# Events held against the fields of their classes.


EVENTS = {name_of(event): event for event in (*OF_LAUNCHERS, *OF_RUNS, *OF_RANKS)}
_COMMON = {"t", "event", "generation", "run", "node", "rank"}


def unknown_fields(event: Mapping[str, Any]) -> set[str]:
    """Fields of an event of opsd that its class lacks, or that are missing. An event of a program has none."""
    kind: Any = EVENTS.get(event["event"])
    if kind is None:
        return set()
    known = {*kind.__required_keys__, *kind.__optional_keys__}
    return (event.keys() - known - _COMMON) | (kind.__required_keys__ - event.keys())
