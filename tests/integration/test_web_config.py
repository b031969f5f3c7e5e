"""The agent with certificates and passwords, also those of clients."""

from __future__ import annotations

import base64
import http.client
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from opsd.agent.loop import Snapshot
from opsd.agent.web.access import WebConfig, WebConfigError, load
from opsd.agent.web.app import App
from opsd.agent.web.server import HANDSHAKES, Server
from tests.fakes.clock import eventually
from tests.fakes.collectors import SILENT
from tests.fakes.process import Opsd

pytest.importorskip("bcrypt")
from opsd.agent.web.asker import Asker
from opsd.settings.sections import AgentSettings

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


# The agent with a certificate and passwords, as Prometheus' own exporters have them.


bcrypt = pytest.importorskip("bcrypt")

yaml = pytest.importorskip("yaml")

HASH = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()


def certificate(folder: Path, name: str = "server") -> tuple[str, str]:
    """A certificate for localhost and its key."""
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.crt",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return f"{name}.crt", f"{name}.key"


def write(folder: Path, text: str) -> Path:
    file = folder / "web.yml"
    file.write_text(text)
    return file


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """The port of a server with TLS, a password, and the folder with its certificate."""
    crt, key = certificate(tmp_path)
    text = f"tls_server_config: {{cert_file: {crt}, key_file: {key}}}\nbasic_auth_users: {{prometheus: '{HASH}'}}\n"
    server = Server("127.0.0.1:0", SILENT, load(write(tmp_path, text)))
    snapshot = Snapshot(1, time.monotonic() + 1e6, 0.0)
    server.start(App(lambda: snapshot, {"node": "n", "mode": "observe"}, stale_s=5.0))
    yield server.server_port, tmp_path
    server.close()


def get(port: int, folder: Path, credentials: str | None) -> tuple[int, str]:
    context = ssl.create_default_context(cafile=folder / "server.crt")
    connection = http.client.HTTPSConnection("localhost", port, timeout=20, context=context)
    encoded = None if credentials is None else base64.b64encode(credentials.encode()).decode()
    connection.request("GET", "/healthz", headers={} if encoded is None else {"Authorization": f"Basic {encoded}"})
    answer = connection.getresponse()
    asked = answer.getheader("WWW-Authenticate", "")
    connection.close()
    return answer.status, asked


def test_only_who_knows_the_password_is_answered(served: tuple[int, Path]) -> None:
    """Over TLS, again and again; everybody else is asked for it."""
    port, folder = served
    assert get(port, folder, "prometheus:secret") == (200, "")
    assert get(port, folder, "prometheus:secret") == (200, "")
    for wrong in (None, "prometheus:wrong", "nobody:secret", "prometheus", "prometheus:\0", ""):
        assert get(port, folder, wrong) == (401, 'Basic realm="opsd", charset="UTF-8"')


class SlowUsers(dict[str, bytes]):
    """Users whose hash takes as long as somebody likes."""

    def __init__(self) -> None:
        super().__init__(prometheus=HASH.encode())
        self.began, self.may_end, self.ended = threading.Event(), threading.Event(), threading.Event()

    def get(self, user: str, default: bytes) -> bytes:
        self.began.set()
        self.may_end.wait(20)
        self.ended.set()
        return super().get(user, default)


def header(credentials: str) -> str:
    return f"Basic {base64.b64encode(credentials.encode()).decode()}"


def test_who_guesses_does_not_hold_up_who_is_known() -> None:
    """Sixty wrong passwords at once took longer than Prometheus waits."""
    users = SlowUsers()
    users.may_end.set()
    web = WebConfig(users=users)
    assert web.admits(header("prometheus:secret"))
    for event in (users.began, users.may_end, users.ended):
        event.clear()
    guess = threading.Thread(target=web.admits, args=(header("prometheus:wrong"),))
    guess.start()
    assert users.began.wait(20)
    assert web.admits(header("prometheus:secret"))
    assert not users.ended.is_set()
    users.may_end.set()
    guess.join(20)


def test_who_guesses_is_not_heard_for_a_while(tmp_path: Path) -> None:
    """Ten wrong passwords at once, then one a second are compared; a hash takes a tenth of a second."""
    users = SlowUsers()
    users.may_end.set()
    server = Server("127.0.0.1:0", SILENT, WebConfig(users=users))
    snapshot = Snapshot(1, time.monotonic() + 1e6, 0.0)
    server.start(App(lambda: snapshot, {"node": "n"}, stale_s=5.0))

    def status(credentials: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        connection.request("GET", "/healthz", headers={"Authorization": header(credentials)})
        found = connection.getresponse().status
        connection.close()
        return found

    try:
        assert status("prometheus:secret") == 200
        found = [status(f"prometheus:{number}") for number in range(60)]
        assert found[:9] == [401] * 9
        assert 429 in found
        assert server.refused["password"] == 60
        assert status("prometheus:secret") == 200
    finally:
        server.close()


def test_who_speaks_no_tls_is_not_answered_and_holds_up_nobody(served: tuple[int, Path]) -> None:
    """Plain HTTP, silence in the middle of the handshake, a certificate that is not trusted."""
    port, folder = served
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
    with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert b"200" not in plain.recv(1000)
    with pytest.raises(ssl.SSLCertVerificationError):
        ssl.create_default_context().wrap_socket(
            socket.create_connection(("127.0.0.1", port)), server_hostname="localhost"
        )
    assert get(port, folder, "prometheus:secret")[0] == 200
    for connection in silent:
        connection.close()


def test_a_peer_has_so_many_handshakes(tmp_path: Path) -> None:
    """They take the one thread milliseconds each, and cost the client nothing; later ones are done again."""
    crt, key = certificate(tmp_path)
    web = load(write(tmp_path, f"tls_server_config: {{cert_file: {crt}, key_file: {key}}}\n"))
    server = Server("127.0.0.1:0", SILENT, web)
    snapshot = Snapshot(1, time.monotonic() + 1e6, 0.0)
    server.start(App(lambda: snapshot, {"node": "n", "mode": "observe"}, stale_s=5.0))
    most = HANDSHAKES[0]
    flood = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(3 * most)]
    assert eventually(lambda: server.refused["share"] >= most)

    def answered() -> bool:
        with suppress(OSError):
            return get(server.server_port, tmp_path, None)[0] == 200
        return False

    assert eventually(answered)
    for connection in flood:
        connection.close()
    server.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tls_server_config: {cert_file: none.crt, key_file: none.key}", "none.crt: No such file or directory"),
        ("tls_server_config: {cert_file: web.yml, key_file: web.yml}", "are not a certificate and its key"),
        ("tls_server_config: {cert_file: a}", "tls_server_config.key_file: field required"),
        ("tls_server_config: {cert_file: a, key_file: b, min_version: TLS10}", "min_version: input should be"),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequireAndVerifyClientCert}",
            "needs a client_ca_file",
        ),
        ("basic_auth_users: {prometheus: secret}", "basic_auth_users.prometheus: not a bcrypt hash"),
        ("basic_auth: {}", "basic_auth: is not a key that opsd knows"),
        ("a: [", "not valid YAML"),
        ("- 1", "the file: "),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    """With the name of the file, and without what is secret in it."""
    file = write(tmp_path, text)
    with pytest.raises(WebConfigError) as error:
        load(file)
    assert str(error.value).startswith(f"{file}: ")
    assert said in str(error.value)
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)


def test_a_key_that_belongs_to_another_certificate_is_refused(tmp_path: Path) -> None:
    """As after half a renewal."""
    crt, _ = certificate(tmp_path)
    _, key = certificate(tmp_path, "other")
    with pytest.raises(WebConfigError, match="KEY_VALUES_MISMATCH"):
        load(write(tmp_path, f"tls_server_config: {{cert_file: {crt}, key_file: {key}}}"))


def test_an_agent_with_a_wrong_configuration_does_not_start(tmp_path: Path) -> None:
    """It would otherwise serve in the clear what was meant to be protected."""
    file = write(tmp_path, "tls_server_config: {cert_file: none.crt, key_file: none.key}")
    opsd = Opsd(tmp_path)
    done = opsd.run("agent", "--config", str(opsd.config), f"--set=agent.web_config={file}")
    assert done.returncode == 2
    assert done.stderr.strip() == f"opsd: {file}: {tmp_path}/none.crt: No such file or directory"


def status(port: int, folder: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "opsd", "status", "--url", f"https://localhost:{port}", *options]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False)


def test_the_commands_take_certificate_and_password_from_files(served: tuple[int, Path]) -> None:
    """Or from the environment; without them one sentence says what is missing."""
    port, folder = served
    trust = f"--ca-file={folder / 'server.crt'}"
    password = folder / "password"
    password.write_text("prometheus:secret\n")
    password.chmod(0o600)
    named = f"--credentials-file={password}"
    assert status(port, folder, trust, named).returncode == 0
    assert status(port, folder, trust, OPSD_AGENT_CREDENTIALS="prometheus:secret").returncode == 0
    for options, said in (
        ((trust,), "put USER:PASSWORD into a file and name it with --credentials-file"),
        ((named,), "not accepted: self-signed certificate"),
        ((f"--ca-file={password}", named), "holds no certificates that can be used"),
        ((trust, named, f"--url=http://node-17:{port}"), "in the clear: use https"),
    ):
        done = status(port, folder, *options)
        assert done.returncode in (1, 2) and said in done.stderr and "Traceback" not in done.stderr
    password.chmod(0o644)
    assert "chmod 600" in status(port, folder, trust, named).stderr


def configured(
    port: int, folder: Path, web: str, *more: str, host: str = "127.0.0.1"
) -> subprocess.CompletedProcess[str]:
    """`opsd status` on a node with this configuration, told nothing else."""
    file = folder / "opsd.toml"
    agent = [f'listen = "{host}:{port}"', f'web_config = "{folder / web}"', *more]
    file.write_text("\n".join(["[agent]", *agent, ""]))
    command = [sys.executable, "-m", "opsd", "status", "--config", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_commands_ask_the_agent_of_their_node_as_it_is_configured(served: tuple[int, Path]) -> None:
    """Over TLS, with the certificate and the password for its peers; what is missing then is said by name."""
    port, folder = served
    (folder / "peers").write_text("prometheus:secret\n")
    trust, known = f'peer_ca_file = "{folder}/server.crt"', f'peer_credentials_file = "{folder}/peers"'
    assert configured(port, folder, "web.yml", trust, known).returncode == 0
    assert configured(port, folder, "web.yml", trust, known, 'node = "localhost"', host="0.0.0.0").returncode == 0
    for more, said in ((trust,), "--credentials-file"), ((known,), "certificates to trust with --ca-file"):
        done = configured(port, folder, "web.yml", *more)
        assert (done.returncode, said in done.stderr) == (1, True)
    (folder / "plain.yml").write_text(f"basic_auth_users: {{prometheus: '{HASH}'}}\n")
    plain = configured(port, folder, "plain.yml")
    assert (plain.returncode, "if it speaks TLS, name it with --url https://NODE:PORT" in plain.stderr) == (1, True)
    assert configured(port, folder, "unreadable.yml", trust, known).returncode == 0


# Agents that ask their clients for a certificate: who has none that is accepted gets no answer, and learns why.


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
