"""JSON Schemas, made from the types of the code: the description of the agent's API, and files of runs."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from opsd.agent.web.api import PROBLEM, Record
from opsd.agent.web.app import API, JSON, OPENAPI, Route
from opsd.checkpoints.manifest import FORMAT, Manifest
from opsd.checkpoints.sealed import CHECKSUM
from opsd.events import OF_LAUNCHERS, OF_RANKS, OF_RUNS, name_of
from opsd.ledger.ledger import BUCKETS, LedgerDocument
from opsd.rundir import RunState
from tests.reference import field_docs

_PLAIN: Mapping[Any, dict[str, Any]] = {
    str: {"type": "string"}, int: {"type": "integer"}, bool: {"type": "boolean"}, float: {"type": "number"},
    type(None): {"type": "null"}, Any: {}, object: {},
}  # fmt: skip
_REFUSALS = {
    "400": "a parameter makes no sense",
    "401": "user and password are missing or wrong",
    "404": "there is nothing of this name",
    "429": "too many requests at once",
    "500": "a bug",
}


FOLDER = Path(__file__).parents[1] / "docs/schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Schemas:
    """Makes schemas and collects those of named objects under ``known``; ``where`` is how they are referred to.

    ``nulls``: a number may be null, as NaN and infinity are where they are written as JSON.
    """

    def __init__(self, where: str = "#/$defs/", *, nulls: bool = False) -> None:
        self._where, self._nulls = where, nulls
        self.known: dict[str, dict[str, Any]] = {}

    def of(self, shape: Any) -> dict[str, Any]:
        """The schema of a type, a Record, or a list of Records of which each item is one."""
        if isinstance(shape, Record):
            return self._named(shape.name, shape.about, self._fields_of(shape))
        if isinstance(shape, list):
            return {"type": "array", "items": self._any([self.of(one) for one in shape])}
        if shape is float and self._nulls:
            return {"type": ["number", "null"]}
        if shape in _PLAIN:
            return dict(_PLAIN[shape])
        origin, arguments = get_origin(shape), get_args(shape)
        if origin in (Union, types.UnionType):
            return self._any([self.of(one) for one in arguments])
        if origin is Literal:
            return {"enum": list(arguments)}
        if origin is not None and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.of(arguments[1])}
        if origin is tuple and arguments[-1] is not ...:
            items = [self.of(one) for one in arguments]
            return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
        if origin is not None and issubclass(origin, Sequence):
            return {"type": "array", "items": self.of(arguments[0])}
        if isinstance(shape, type) and issubclass(shape, Enum):
            return {"enum": [one.value for one in shape]}
        optional = getattr(shape, "__optional_keys__", ())
        found = {name: (kind, name not in optional) for name, kind in _hints(shape).items()}
        return self._named(shape.__name__, said(shape), found, field_docs(shape))

    def _fields_of(self, record: Record) -> dict[str, tuple[Any, bool]]:
        """The type of each field, and whether it is always there."""
        hints = _hints(record.of) if record.of else {}
        wanted = record.only or [name for name in hints if name not in record.without]
        more = {name.removesuffix("?"): (shape, not name.endswith("?")) for name, shape in record.more.items()}
        return {**{name: (hints[name], True) for name in wanted}, **more}

    def _named(
        self,
        name: str,
        about: str,
        found: Mapping[str, tuple[Any, bool]],
        docs: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "object", "description": about}
        if name not in self.known:
            self.known[name] = schema
            schema["properties"] = {
                key: {**self.of(shape), **({"description": docs[key]} if docs.get(key) else {})}
                for key, (shape, _) in found.items()
            }
            schema["required"] = [key for key, (_, always) in found.items() if always]
        return {"$ref": self._where + name}

    @staticmethod
    def _any(schemas: list[dict[str, Any]]) -> dict[str, Any]:
        different = [one for number, one in enumerate(schemas) if one not in schemas[:number]]
        return different[0] if len(different) == 1 else {"anyOf": different}


def _hints(kind: type) -> dict[str, Any]:
    """The fields of a dataclass, a model or a TypedDict with their types."""
    hints = get_type_hints(kind)
    if is_dataclass(kind):
        return {field.name: hints[field.name] for field in fields(kind)}
    if issubclass(kind, BaseModel):
        return {name: hints[name] for name in kind.model_fields}
    assert typing.is_typeddict(kind), f"{kind} has no fields"
    return hints


def said(kind: Any) -> str:
    """The docstring as one line of Markdown."""
    return re.sub(r"\s+", " ", inspect.getdoc(kind) or "").replace("``", "`").strip()


def openapi() -> str:
    """The description of the agent's API."""
    schemas = Schemas("#/components/schemas/", nulls=True)
    problem = {"content": {"application/json": {"schema": schemas.of(PROBLEM)}}}
    responses = {f"Refused{code}": {"description": text, **problem} for code, text in _REFUSALS.items()}
    paths = {route.path: {"get": _operation(route, schemas)} for route in API}
    return written(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "opsd agent",
                "version": "1",
                "description": "What an agent knows of its node, read-only. Times are epoch seconds unless a name or "
                "a description says otherwise. Numbers that JSON does not have (NaN, infinity) are null. Later "
                "releases may add fields.",
            },
            "servers": [{"url": "http://127.0.0.1:9477"}],
            "security": [{}, {"password": []}],
            "paths": paths,
            "components": {
                "schemas": dict(sorted(schemas.known.items())),
                "responses": responses,
                "securitySchemes": {
                    "password": {"type": "http", "scheme": "basic", "description": "With `agent.web_config`."}
                },
            },
        }
    )


def _operation(route: Route, schemas: Schemas) -> dict[str, Any]:
    id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    asked = [{"name": p.name, "in": "query", "description": p.about, "schema": p.schema} for p in route.parameters]
    one = "{id}" in route.path
    refusals = [code for code in _REFUSALS if code != "404" or one]
    return {
        "operationId": re.sub(r"\W+", "_", route.path.removeprefix("/api/v1/")).strip("_"),
        "summary": route.about,
        "parameters": [*([id] if one else []), *asked],
        "responses": {
            "200": {"description": route.about, "content": {_media_type(): {"schema": schemas.of(route.shape)}}},
            **{code: {"$ref": f"#/components/responses/Refused{code}"} for code in refusals},
        },
    }


def _media_type() -> str:
    return JSON.partition(";")[0]


def written(schema: Mapping[str, Any]) -> str:
    """As it stands in a file."""
    return json.dumps(schema, indent=1) + "\n"


def documents() -> dict[str, dict[str, Any]]:
    """The schema of each kind of file, by its name."""
    manifest = _document("manifest.json of a checkpoint, format 2.", Manifest)
    manifest["$defs"]["Manifest"]["properties"] |= {"format": {"const": FORMAT}, CHECKSUM: {"type": "string"}}
    manifest["$defs"]["Manifest"]["required"].append(CHECKSUM)
    ledger = _document("The output of `opsd ledger --json`.", LedgerDocument)
    ledger["$defs"]["LedgerDocument"]["properties"]["buckets"]["required"] = [*BUCKETS]
    return {
        "events": _events(),
        "run": _document("run.json in the folder of a run in shared memory.", RunState),
        "manifest": manifest,
        "ledger": ledger,
    }


def _document(title: str, shape: Any) -> dict[str, Any]:
    schemas = Schemas()
    return {"$schema": DIALECT, "title": title, **schemas.of(shape), "$defs": schemas.known}


def _events() -> dict[str, Any]:
    """Of a line: the fields that all events have, and those of each event of opsd."""
    schemas = Schemas()
    by_name = [
        {
            "if": {"properties": {"event": {"const": name_of(event)}}},
            "then": {**schemas.of(event), **({"required": ["rank"]} if event in OF_RANKS else {})},
        }
        for event in (*OF_LAUNCHERS, *OF_RUNS, *OF_RANKS)
    ]
    common = {"t": float, "event": str, "generation": int, "run": str, "node": str}
    return {
        "$schema": DIALECT,
        "title": "A line of events.jsonl.",
        "type": "object",
        "properties": {
            **{name: schemas.of(kind) for name, kind in common.items()},
            "rank": {"type": ["integer", "null"]},
        },
        "required": [*common],
        "allOf": by_name,
        "$defs": schemas.known,
    }


def rendered() -> dict[Path, str]:
    """File and content of every schema."""
    return {
        OPENAPI: openapi(),
        **{FOLDER / f"{name}.schema.json": written(schema) for name, schema in documents().items()},
    }
