"""A real agent's answers over HTTP, held against the description that it serves."""

from __future__ import annotations

import json
import os
from pathlib import Path

from opsd.client import Reporter
from opsd.simulated.gpus import SimulatedGpus
from tests.fakes.clock import eventually
from tests.fakes.openapi import Description
from tests.fakes.process import Opsd


def test_the_api_of_a_real_agent_is_as_described(tmp_path: Path, library: str) -> None:
    """Every route of its own description, with a run, a rank and an incident."""
    gpus = SimulatedGpus.create(tmp_path / "gpus.state", count=2)
    opsd = Opsd(tmp_path, library, gpus)
    folder = tmp_path / "shm/run"
    folder.mkdir(parents=True)
    own = {
        "run": "run", "job": "", "node": "n", "state": "running", "generation": 1, "launcher_pid": os.getpid(),
        "launcher_start": 1, "world_size": 1, "control": "", "folder": str(tmp_path), "logs": str(tmp_path),
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(own))
    Reporter(folder / "rank-0000.page", rank=0, gpu=1, run="run").step(tokens=10, loss=float("nan"))
    with gpus, opsd.agent("--set=agent.interval_s=0.2"):
        assert eventually(lambda: (opsd.get("/metrics") or "").count("\nDCGM_FI_DEV_GPU_TEMP{") == 2)
        gpus[1].lost = True
        incidents = eventually(lambda: json.loads(opsd.get("/api/v1/incidents") or "{}").get("incidents"))
        description = Description(opsd.get("/api/v1/openapi.json") or "")
        assert len(description.paths) >= 10
        ids = {"incidents": incidents[0]["id"], "jobs": "run", "repairs": None}
        for path in description.paths:
            if (id := ids.get(path.split("/")[3], "")) is not None:
                body = opsd.get(path.replace("{id}", id))
                assert body is not None and description.errors(path, 200, body) == [], path
        status = json.loads(opsd.get("/api/v1/status") or "{}")
        assert status["ranks"] and status["runs"] and len(status["gpus"]) == 2
        assert "null" in (opsd.get("/api/v1/ranks") or "")
