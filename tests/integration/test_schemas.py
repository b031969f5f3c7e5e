"""Files of a real run that loses a rank, held against the JSON Schemas of the documentation."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trainer_world import CONFIG

from opsd import exitcodes
from tests.fakes.launched import Launched
from tests.fakes.schemas import errors, schema, strict, unknown_fields


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> dict[str, list[Any]]:
    """The documents that the run has written, by their schema."""
    folder = tmp_path_factory.mktemp("run")
    config = folder / "config.toml"
    config.write_text(CONFIG)
    program = ("-m", "opsd.trainer", str(config), f"--set=data.shards={shards}")
    with Launched(folder, "", "--nproc-per-node=2", "--no-standby", program=program) as run:
        run.until(lambda: bool(run.events("checkpoint_committed")))
        states = [run.state]
        os.kill(run.events("generation_started")[0]["ranks"][1]["pid"], signal.SIGKILL)
        assert run.wait() == exitcodes.OK, run.err
        states.append(run.state)
    command = [sys.executable, "-m", "opsd", "ledger", "--json", str(run.run)]
    ledger = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
    manifests = [json.loads(path.read_text()) for path in sorted((run.run / "checkpoints").glob("*/manifest.json"))]
    return {"events": lines, "run": states, "manifest": manifests, "ledger": [json.loads(ledger)]}


@pytest.mark.parametrize("name", ["run", "manifest", "ledger"])
def test_documents_are_as_their_schema_says(files: dict[str, list[Any]], name: str) -> None:
    """No field is missing, none is unknown."""
    assert files[name]
    for document in files[name]:
        assert errors(strict(schema(name)), document) == []


def test_events_are_as_their_schema_says(files: dict[str, list[Any]]) -> None:
    """Those of the launcher and of the ranks, before and after the failure."""
    kinds = {event["event"] for event in files["events"]}
    assert kinds >= {
        "generation_started", "rank_exited", "resumed", "checkpoint_committed", "checkpoint_loaded", "finished",
    }  # fmt: skip
    for event in files["events"]:
        assert (errors(schema("events"), event), unknown_fields(event)) == ([], set())


@pytest.mark.parametrize("name", ["events", "run", "manifest", "ledger"])
def test_a_broken_document_is_refused(files: dict[str, list[Any]], name: str) -> None:
    """Each field of each document is needed, and none is a list of lists."""
    told = schema(name)
    for document in files[name]:
        for field in document:
            optional = name == "events" and field in ("standby", "ranks")
            broken = copy.deepcopy(document)
            broken[field] = [[]]
            assert errors(told, broken), field
            del broken[field]
            assert errors(told, broken) or optional, field
