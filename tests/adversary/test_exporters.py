"""A user who listens where dcgm-exporter or NCCL's RAS does: what it says leads to nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opsd.ports import free_port
from tests.adversary.attacker import NOBODY, Attacker
from tests.adversary.attacks import false_exporter, false_ras, invent_run
from tests.adversary.node import NAME, Node
from tests.fakes.clock import eventually
from tests.fakes.ras import missing_rank, ras_json, ras_rank

# A user who listens where dcgm-exporter does: what it says leads to nothing, and hides nothing.


TEMP, REMAP, PROFILE = "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_ROW_REMAP_FAILURE", "DCGM_FI_PROF_DRAM_ACTIVE"

LINE = '{name}{{gpu="{gpu}",UUID="{uuid}",pci_bus_id="x",device="x",modelName="x",Hostname="box"}} {value}'


def page(node: Node, *lines: tuple[str, int, float]) -> str:
    """An exporter's page about GPUs of the node: name, index and value. Its labels are of its own making."""
    said = (LINE.format(name=name, gpu=index, uuid=node.gpus[index].uuid, value=value) for name, index, value in lines)
    return "\n".join((*said, ""))


@contextmanager
def exporter(port: int, text: str, host: str = "127.0.0.1") -> Iterator[None]:
    """Root's own exporter, in this process."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((host, port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def test_a_false_exporter_drains_no_node(node: Node, attacker: Attacker) -> None:
    """Its row-remap failure, and a run that it invents, open no incident and begin no action."""
    port = free_port()
    node.configure("[dcgm]", f'url = "http://localhost:{port}/metrics"', "interval_s = 0.5")
    attacker.start(invent_run, str(node.shm), "run")
    attacker.start(false_exporter, "127.0.0.1", port, page(node, (REMAP, 0, 1.0)))
    with node.agent("--set=agent.interval_s=0.2"):
        assert eventually(lambda: node.ticks() > 25)
        assert eventually(lambda: node.series("opsd_dcgm_untrusted") == {"": 1.0})
        assert node.kinds() & {"gpu_row_remap"} == set()
        assert (node.actions(), node.slurm_orders()) == ([], [])


def test_a_false_exporter_replaces_no_value(node: Node, attacker: Attacker) -> None:
    """Also where the agent only observes: every GPU has the temperature that its driver tells, once. It adds none
    either: of what the driver does not tell there is no series, and no incident to page anybody for.
    """
    port = free_port()
    node.configure("[dcgm]", f'url = "http://localhost:{port}/metrics"')
    node.gpus[0].set_unsupported([145])  # the field of a failed remap
    attacker.start(false_exporter, "127.0.0.1", port, page(node, (TEMP, 0, 99.0), (REMAP, 0, 1.0)))
    with node.agent("--set=policy.mode=observe", "--set=agent.interval_s=0.2"):
        assert eventually(lambda: node.series("opsd_dcgm_untrusted") == {"": 1.0})
        ticks = node.ticks()
        assert eventually(lambda: node.ticks() > ticks + 10)
        temperatures = node.series(TEMP)
        assert len(temperatures) == 2 and 99.0 not in temperatures.values()
        assert [labels for labels in node.series(REMAP) if node.gpus[0].uuid in labels] == []
        assert node.kinds() & {"gpu_row_remap"} == set()


def test_a_false_exporter_does_not_hide_the_true_one(node: Node, attacker: Attacker) -> None:
    """Of the two addresses of localhost a user takes the one that root's exporter has left free."""
    port = free_port()
    node.configure("[dcgm]", f'url = "http://localhost:{port}/metrics"')
    attacker.start(false_exporter, "::1", port, page(node, (PROFILE, 0, 1.0)))
    with exporter(port, page(node, (PROFILE, 0, 0.25))), node.agent("--set=nvml.profiling=false"):
        assert eventually(lambda: list(node.series(PROFILE).values()) == [0.25])
        assert node.series("opsd_dcgm_exporter_up") == {"": 1.0}


def test_an_exporter_of_a_named_user_is_believed(node: Node, attacker: Attacker) -> None:
    """As far as the driver says nothing itself; the node is not drained on its word, in act mode either."""
    port = free_port()
    node.configure("[dcgm]", f'url = "http://localhost:{port}/metrics"', f'users = ["{attacker.uid}"]')
    attacker.start(invent_run, str(node.shm), "run")
    node.gpus[0].set_unsupported([145])  # the field of a failed remap
    attacker.start(false_exporter, "127.0.0.1", port, page(node, (REMAP, 0, 1.0)))
    with node.agent("--set=agent.interval_s=0.2"):
        assert eventually(lambda: "gpu_row_remap" in node.kinds())
        (incident,) = (one for one in node.incidents() if one["kind"] == "gpu_row_remap")
        assert [said["source"] for said in incident["evidence"] if "has failed" in said["text"]] == ["DCGM"]
        assert eventually(lambda: bool(node.incidents()[0]["actions"]))
        refused = [action for action in node.incidents()[0]["actions"] if action["verb"] == "swap_node"]
        assert [action["outcome"] for action in refused] == ["refused"]
        assert "driver" in refused[0]["detail"]
        assert node.slurm_orders() == []


def test_an_exporter_with_labels_of_its_own_hides_nothing(node: Node) -> None:
    """It knows one of two GPUs, by other labels, and one that is not there, which shows."""
    port = free_port()
    node.configure("[dcgm]", f'url = "http://localhost:{port}/metrics"')
    stranger = LINE.format(name=TEMP, gpu=7, uuid="GPU-7", value=99.0)
    with exporter(port, f"{page(node, (TEMP, 0, 99.0))}{stranger}\n"), node.agent():
        assert eventually(lambda: node.series("opsd_dcgm_disagreements") == {"": 1.0})
        temperatures = node.series(TEMP)
        assert len(temperatures) == 2 and 99.0 not in temperatures.values()
        assert all(NAME in labels for labels in temperatures)
        (dcgm,) = (one for one in node.status()["collectors"] if one["name"] == "dcgm")
        assert dcgm["reason"] == "DCGM and the driver disagree on GPU-7, which the driver does not know"


# A user who listens where NCCL's RAS does: what it says is about that user's own runs at most.


VICTIM = NOBODY - 1


def test_a_false_ras_speaks_for_no_other_users_run(node: Node, attacker: Attacker) -> None:
    """It is not asked while the runs here are another's."""
    port = free_port()
    node.configure("[nccl]", f'ras = ["127.0.0.1:{port}"]', "interval_s = 1.0")
    victim = Attacker(VICTIM)
    try:
        victim.start(invent_run, str(node.shm), "train")
        requests = attacker.start(false_ras, port, ras_json([ras_rank(0, {})], [missing_rank(1)]))
        with node.agent():
            assert eventually(lambda: node.series("opsd_nccl_ras_up") == {"": 0.0})
            assert eventually(lambda: node.ticks() > 4)
            assert node.series("opsd_nccl_problems") == {}
    finally:
        victim.close()
    requests.kill()
    assert requests.stdout is not None
    assert "CLIENT PROTOCOL" not in requests.stdout.read()
