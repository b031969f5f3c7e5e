"""Agents that ask their clients for a certificate: who has none that is accepted gets no answer, and learns why."""

from __future__ import annotations

import http.client
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("bcrypt")

from opsd.agent.loop import Snapshot
from opsd.agent.web.access import WebConfigError, load
from opsd.agent.web.app import App
from opsd.agent.web.asker import Asker
from opsd.agent.web.server import Server
from opsd.settings.sections import AgentSettings
from tests.fakes.agent import SILENT

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")

CLIENTS = {
    "none": "asks for a client certificate (certificate required)",
    "stranger": "does not accept the client's certificate: unknown ca",
    "expired": "does not accept the client's certificate: certificate expired",
}
SERVERS = {
    "stranger": "has a certificate that is not accepted: unable to get local issuer certificate",
    "expired": "has a certificate that is not accepted: certificate has expired",
    "elsewhere": "has a certificate that is not accepted: Hostname mismatch, certificate is not valid for 'localhost'",
}


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def authority(folder: Path, name: str) -> None:
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(folder, "req", "-x509", *key, "-days", "2", "-subj", f"/CN={name}", "-keyout", f"{name}.key",
            "-out", f"{name}.crt")  # fmt: skip


def issue(folder: Path, name: str, *, by: str = "ca", host: str = "localhost", days: int = 2) -> None:
    """A certificate for ``host`` and its key; with ``days`` below zero it is over."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(folder, "req", *key, "-subj", f"/CN={host}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
    (folder / f"{name}.ext").write_text(f"subjectAltName=DNS:{host}\n")
    openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{by}.crt", "-CAkey", f"{by}.key", "-CAcreateserial",
            "-days", str(days), "-extfile", f"{name}.ext", "-out", f"{name}.crt")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates: of the cluster's authority, over, for another host, and of another authority."""
    folder = tmp_path_factory.mktemp("certificates")
    authority(folder, "ca")
    authority(folder, "foreign")
    issue(folder, "node")
    issue(folder, "expired", days=-1)
    issue(folder, "elsewhere", host="elsewhere")
    issue(folder, "stranger", by="foreign")
    return folder


def web_config(folder: Path, name: str, auth: str = "RequireAndVerifyClientCert") -> Path:
    """A configuration with the certificate ``name``."""
    file = folder / f"{name}-{auth}.yml"
    tls = f"cert_file: {name}.crt, key_file: {name}.key, client_ca_file: ca.crt, client_auth_type: {auth}"
    file.write_text(f"tls_server_config: {{{tls}}}\n")
    return file


@contextmanager
def serving(web: Path) -> Iterator[Server]:
    server = Server("127.0.0.1:0", SILENT, load(web))
    snapshot = Snapshot(1, time.monotonic() + 1e6, 0.0)
    server.start(App(lambda: snapshot, {"node": "n", "mode": "observe"}, stale_s=5.0))
    try:
        yield server
    finally:
        server.close()


def scrape(server: Server, folder: Path, name: str) -> int:
    """The status that a client with the certificate ``name`` gets. Raises OSError."""
    context = ssl.create_default_context(cafile=folder / "ca.crt")
    if name != "none":
        context.load_cert_chain(folder / f"{name}.crt", folder / f"{name}.key")
    connection = http.client.HTTPSConnection("localhost", server.server_port, timeout=20, context=context)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_scrape_needs_a_certificate_that_is_accepted(folder: Path) -> None:
    """The others are refused and counted, and keep nobody from being answered."""
    with serving(web_config(folder, "node")) as server:
        for name in CLIENTS:
            with pytest.raises(OSError, match=r"SSL|closed|reset|pipe|EOF"):
                scrape(server, folder, name)
        assert scrape(server, folder, "node") == 200
        assert (server.refused["certificate"], server.refused["malformed"]) == (3, 0)


def test_agents_show_one_another_their_own_certificate(folder: Path) -> None:
    """Nothing needs to be set beside what the server has."""
    with serving(web_config(folder, "node")) as server:
        assert asker(folder, server, web_config(folder, "node")).node("localhost").summary is not None


def asker(folder: Path, server: Server, web: Path) -> Asker:
    listen = f"0.0.0.0:{server.server_port}"
    return Asker(AgentSettings(listen=listen, web_config=web, peer_ca_file=folder / "ca.crt"))


@pytest.mark.parametrize(("name", "said"), CLIENTS.items())
def test_an_agent_that_is_refused_says_why(folder: Path, name: str, said: str) -> None:
    """In the words of the node that refuses it."""
    own = web_config(folder, "node", "NoClientCert") if name == "none" else web_config(folder, name)
    with serving(web_config(folder, "node")) as server:
        answer = asker(folder, server, own).node("localhost")
    assert (answer.summary, answer.problem) == (None, said)


@pytest.mark.parametrize(("name", "said"), SERVERS.items())
def test_an_agent_with_a_wrong_certificate_is_not_believed(folder: Path, name: str, said: str) -> None:
    """Another program may listen at that port, or another node have the address."""
    with serving(web_config(folder, name)) as server:
        answer = asker(folder, server, web_config(folder, "node")).node("localhost")
    assert (answer.summary, answer.problem) == (None, said)


@pytest.mark.parametrize(("name", "code"), [("none", 1), ("node", 0)])
def test_commands_show_the_certificate_of_the_node(folder: Path, tmp_path: Path, name: str, code: int) -> None:
    """Where it is not configured, one sentence says what the agent asks for."""
    web = web_config(folder, "node", "NoClientCert" if name == "none" else "RequireAndVerifyClientCert")
    config = tmp_path / "opsd.toml"
    config.write_text(f'[agent]\nweb_config = "{web}"\npeer_ca_file = "{folder}/ca.crt"\n')
    with serving(web_config(folder, "node")) as server:
        url = f"https://localhost:{server.server_port}"
        command = [sys.executable, "-m", "opsd", "status", "--url", url, "--config", str(config)]
        ended = subprocess.run([*command, "--ca-file", f"{folder}/ca.crt"], capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stderr
    if code:
        assert ended.stderr.count("\n") == 1
        assert "asks for a client certificate" in ended.stderr


def test_an_authority_that_is_none_is_named(folder: Path) -> None:
    """And not the certificate beside it."""
    web = web_config(folder, "node")
    web.with_name("other.yml").write_text(web.read_text().replace("ca.crt", "ca.key"))
    with pytest.raises(WebConfigError, match=r"client_ca_file ca\.key holds no certificates"):
        load(web.with_name("other.yml"))
