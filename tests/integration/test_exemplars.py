"""A real Prometheus leads from a counter of the agent to the incident."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from opsd.ports import free_port
from opsd.simulated.gpus import SimulatedGpus
from tests.fakes.clock import eventually
from tests.fakes.process import Opsd

CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs: [{{job_name: opsd, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}]
"""


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (a Debian package) is not installed")
def test_prometheus_has_the_incident_of_a_counter(tmp_path: Path, library: str) -> None:
    """Of the incidents opened and of the Xids; the agent knows the id."""
    gpus = SimulatedGpus.create(tmp_path / "gpus.state", count=2)
    opsd, port = Opsd(tmp_path, library, gpus), free_port()
    file = tmp_path / "prometheus.yml"
    file.write_text(CONFIG.format(port=opsd.port))
    command = [
        "prometheus", f"--config.file={file}", f"--storage.tsdb.path={tmp_path}/tsdb",
        f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage",
    ]  # fmt: skip

    def asked(query: str) -> list[dict[str, Any]]:
        values = urllib.parse.urlencode({"query": query, "start": 0, "end": 4e9})
        try:
            url = f"http://127.0.0.1:{port}/api/v1/query_exemplars?{values}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                return list(json.load(answer)["data"])
        except OSError:
            return []

    with (
        gpus,
        opsd.agent("--set=agent.interval_s=0.2"),
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as prometheus,
    ):
        try:
            assert eventually(opsd.shows('opsd_collector_state{collector="nvml",state="ok"} 1.0'))
            gpus[0].raise_xid(119)
            for query in ('opsd_incidents_opened_total{kind="gpu_xid"}', 'opsd_xid_total{code="119"}'):
                assert eventually(lambda query=query: asked(query), 60), query
                (series,) = asked(query)
                id = series["exemplars"][0]["labels"]["incident_id"]
                assert json.loads(opsd.get(f"/api/v1/incidents/{id}") or "{}")["kind"] == "gpu_xid"
        finally:
            prometheus.kill()
