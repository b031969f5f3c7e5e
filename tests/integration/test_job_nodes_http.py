"""The page of a job from several agents, over real connections."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from opsd.agent.web.access import load
from opsd.agent.web.app import App, Request
from opsd.agent.web.asker import Asker
from opsd.agent.web.fleet import Fleet, JobNodes
from opsd.agent.web.server import Server
from opsd.runbooks.base import Severity
from opsd.settings.sections import AgentSettings
from opsd.slurm.port import Node
from tests.fakes.clock import eventually
from tests.fakes.collectors import SILENT
from tests.fakes.incidents import incident
from tests.fakes.slurm import FakeSlurm
from tests.fakes.webhook import answering
from tests.integration.test_web_config import HASH, certificate, write
from tests.unit.test_page import rank, run, snapshot
from tests.unit.test_page_job import speeds

HOST = "localhost"


def application(node: str, **shown: object) -> App:
    here = snapshot(samples=(speeds("train", (0, 1)),), runs=[run()], ranks=[rank(0), rank(1)], **shown)
    return App(lambda: here, {"node": node}, stale_s=1e9)


def page_of_a_job(asker: Asker, nodes: list[str]) -> str:
    """As the agent of node-17 shows it, once the other ``nodes`` have been asked."""
    known = JobNodes("node-17", lambda _job: ["node-17", *nodes], asker.job)
    assert eventually(lambda: len(known.of("4242").answers) == len(nodes))
    here = snapshot(samples=(speeds("train", (0, 1)),), runs=[run()], ranks=[rank(0), rank(1)])
    app = App(lambda: here, {"node": "node-17"}, stale_s=1e9, job_nodes=known)
    return app(Request("/job/4242", {}))[1].decode()


def test_a_job_is_shown_with_all_its_nodes() -> None:
    """Ranks and tokens are added up, and an incident elsewhere is seen here, as text whatever is written in it."""
    server = Server("127.0.0.1:0", SILENT)
    server.start(application(HOST, incidents=(incident(job="4242", summary="GPU 3 is <b>hot</b>"),)))
    asker = Asker(AgentSettings(listen=f"0.0.0.0:{server.server_port}"))
    try:
        page = page_of_a_job(asker, [HOST, "no-such-node.invalid"])
    finally:
        server.close()
    for said in ("2 of 3 answer", "4 of 4", "50,000", "GPU 3 is &lt;b&gt;hot&lt;/b&gt;", "does not answer"):
        assert said in page


def test_all_nodes_are_on_one_page() -> None:
    """Those that answer with what they say, those that do not with the reason; Slurm's state beside both."""
    server = Server("127.0.0.1:0", SILENT)
    server.start(application(HOST, incidents=(incident(severity=Severity.CRITICAL, summary="GPU 3 is lost"),)))
    asker = Asker(AgentSettings(listen=f"0.0.0.0:{server.server_port}"))
    slurm = FakeSlurm([Node(HOST, "allocated"), Node("no-such-node.invalid", "down"), Node("node-17", "idle")])
    fleet = Fleet("node-17", lambda: slurm, asker.node)
    try:
        assert eventually(lambda: len(fleet.view().others.answers) == 2)
    finally:
        server.close()
    here = App(lambda: snapshot(), {"node": "node-17"}, stale_s=1e9, fleet=fleet)
    page = here(Request("/fleet", {}))[1].decode()
    for said in ("2 of 3 answer", "1 critical", "GPU 3 is lost", "does not answer", "allocated", "down"):
        assert said in page
    assert page.index(">localhost<") < page.index(">no-such-node") < page.index(">node-17</a></th>")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_they_are_asked_over_tls_with_a_password(tmp_path: Path) -> None:
    """With the certificate and the file of the settings, and refused without."""
    pem, key = certificate(tmp_path)
    users = f"basic_auth_users: {{agent: '{HASH}'}}\n"
    web = write(tmp_path, f"tls_server_config: {{cert_file: {pem}, key_file: {key}}}\n{users}")
    (tmp_path / "credentials").write_text("agent:secret\n")
    server = Server("127.0.0.1:0", SILENT, load(web))
    server.start(application(HOST))
    settings = AgentSettings(listen=f"0.0.0.0:{server.server_port}", web_config=web, peer_ca_file=tmp_path / pem)
    try:
        refused = Asker(settings).job(HOST, "4242")
        knowing = settings.model_copy(update={"peer_credentials_file": tmp_path / "credentials"})
        admitted = Asker(knowing).job(HOST, "4242")
    finally:
        server.close()
    assert (refused.summary, refused.problem) == (None, "answers what is not understood (401)")
    assert admitted.summary is not None and admitted.summary.ranks == 2


def test_a_password_is_never_sent_in_the_clear(tmp_path: Path) -> None:
    """A listener on the network, or at that port of another node, would have it."""
    web = write(tmp_path, f"basic_auth_users: {{agent: '{HASH}'}}\n")
    (tmp_path / "credentials").write_text("agent:secret\n")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.5)
        port = listener.getsockname()[1]
        settings = AgentSettings(
            listen=f"0.0.0.0:{port}", web_config=web, peer_credentials_file=tmp_path / "credentials"
        )
        answer = Asker(settings).job("127.0.0.1", "4242")
        with pytest.raises(TimeoutError):
            listener.accept()
    assert (answer.summary, answer.problem) == (None, "is not asked: without TLS the password would go in the clear")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "knows of no run of this job"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "answers what is not understood (200)"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n" + b"\xff" * 9, "answers what is not understood (200)"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not answer"),
    ],
)
def test_what_answers_need_not_be_an_agent(answer: bytes, said: str) -> None:
    """It is a line on the page, and nothing else."""
    with answering(answer) as url:
        found = Asker(AgentSettings(listen=url.replace("http://127.0.0.1", "0.0.0.0"))).job("127.0.0.1", "4242")
    assert found.summary is None
    assert said in found.problem
