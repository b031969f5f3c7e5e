"""Answers of the agent, held against the description of its API."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator


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
