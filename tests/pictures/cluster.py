"""A cluster for the pictures: agents on five simulated nodes, two jobs, a spare, a node that is silent, and faults."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

from opsd.preflight.view import openmetrics
from opsd.stack.world import GPUS, Stack, StackNode
from tests.fakes.preflight import CLOCK, DISK, GEMM, report

SILENT: Final = "node-21"
DOWN_S: Final = 6.0
"""How long a restart takes."""


def _nodes(folder: Path) -> Iterator[StackNode]:
    def place(name: str) -> Path:
        (folder / name).mkdir()
        return folder / name

    leader = StackNode(place("node-17"), world_size=2 * GPUS)
    yield leader
    yield StackNode(place("node-18"), name="node-18", first_rank=GPUS, world_size=2 * GPUS, leader=leader)
    yield StackNode(place("node-19"), name="node-19", job="4250", run="finetune")
    spare = StackNode(place("node-20"), name="node-20", job="", run="")
    now = time.time()
    verdict = {"ready": True, "checked_at": now, "expires_at": now + 86_400, "staged_bytes": 180 << 30}
    (spare.folder / "state").mkdir()
    (spare.folder / "state" / "spare.json").write_text(json.dumps(verdict))
    yield spare


@contextmanager
def node_exporter() -> Iterator[str]:
    """The address of something that shows, as node_exporter would, what `opsd preflight --textfile` writes."""
    text = openmetrics(report(GEMM, CLOCK, DISK, started=time.time() - 7200)).replace("# EOF\n", "").encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[Stack, list[StackNode]]]:
    """The stack around the nodes. Raises StackError or NoCompilerError."""
    nodes = [*_nodes(folder)]
    with (
        node_exporter() as exporter,
        Stack(folder, scrape_s=2.0, rules_s=2.0, node_exporters=[exporter], nodes=nodes, silent=[SILENT]) as stack,
    ):
        yield stack, nodes


def story(nodes: list[StackNode], seconds: float, wait: Callable[[float], None] = time.sleep) -> None:
    """Within ``seconds``: a GPU overheats and cools, memory errors, a rank dies, another GPU overheats for good."""
    leader, second, other, _ = nodes
    wait(seconds * 0.25)
    leader.gpus[3].cooling = 0.45
    wait(seconds * 0.2)
    leader.gpus[3].cooling = 1.0
    wait(seconds * 0.1)
    second.gpus[5].set_ecc(corrected=4)
    wait(seconds * 0.1)
    leader.restart(DOWN_S)
    second.restart(DOWN_S)
    wait(seconds * 0.2)
    other.overheat(6)
    wait(seconds * 0.15)
