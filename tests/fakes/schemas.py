"""Values held against the schemas that users get."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator

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
