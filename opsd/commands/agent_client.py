"""The client of the agent's API, and the options that its commands share."""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import click

from opsd.agent.web.access import client_certificate, has_tls
from opsd.agent.web.tls import problem_of
from opsd.collectors.lib.listener import UntrustedError, connect
from opsd.commands.options import option, options
from opsd.commands.output import fail
from opsd.commands.settings import BadConfig, load
from opsd.settings.sections import AgentSettings
from opsd.words import reason

TIMEOUT_S = 5.0

_agent_options = options(
    option("--url", help="Where the agent listens, for instance http://node-17:9477."),
    option("--config", "file", type=click.Path(path_type=Path), metavar="FILE", help="Take the address from FILE."),
    option(
        "--ca-file",
        envvar="OPSD_AGENT_CA_FILE",
        type=click.Path(path_type=Path),
        help="Trust the certificates in this file instead of the system's.",
    ),
    option(
        "--credentials-file",
        envvar="OPSD_AGENT_CREDENTIALS_FILE",
        type=click.Path(path_type=Path),
        help="File with USER:PASSWORD for the agent; or set OPSD_AGENT_CREDENTIALS to USER:PASSWORD.",
    ),
)


def with_agent(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``command`` the argument ``agent``, made from --url, --config, --ca-file and --credentials-file."""

    @wraps(command)
    def run(
        *args: Any, url: str | None, file: Path | None, ca_file: Path | None, credentials_file: Path | None, **rest: Any
    ) -> Any:
        return command(*args, agent=Agent(url, file, ca_file, _credentials(credentials_file)), **rest)

    return _agent_options(run)


def agent_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``with_agent``, and --json."""
    return with_agent(option("--json", "as_json", is_flag=True, help="Print the agent's answer as JSON.")(command))


class NoAgent(Exception):
    """No agent answers; the message says where and what to do."""


class Refused(Exception):
    """The agent refused the request; the message is the agent's sentence."""


class Absent(Refused):
    """The agent has nothing there, as one of an earlier release."""


class Agent:
    """The API of one agent, at ``url`` or at the listen address in the configuration ``file``.

    ``ca_file`` has the certificates to trust instead of the system's, ``credentials`` are user and password; without
    ``url`` both default to those with which this node's agent asks others. Without TLS, credentials are sent to this
    node only, and there to root, this user, or whose the agent's state is: any user can listen on a free port. Raises
    click.UsageError if credentials would be sent over a network unencrypted, and if ``url`` is invalid.
    """

    def __init__(
        self,
        url: str | None,
        file: Path | None,
        ca_file: Path | None = None,
        credentials: tuple[str, str] | None = None,
    ) -> None:
        self.named, self.file = url is not None, file
        if url is None:
            settings = load(file).agent
            self.base = _base(settings)
            if self.base.startswith("https:"):
                ca_file = ca_file or settings.peer_ca_file
                credentials = credentials or _peer_credentials(settings.peer_credentials_file)
        else:
            self.base = url.rstrip("/")
        if urlsplit(self.base).scheme not in ("http", "https"):
            raise click.UsageError(f"--url {url} is no address such as http://node-17:9477")
        self._ca_file, self._credentials = ca_file, credentials
        if credentials is not None and not _private(self.base):
            raise click.UsageError(f"the password would go to {self.base} in the clear: use https")

    def get(self, path: str, **query: str | int | Sequence[str]) -> Any:
        """The agent's answer. Raises NoAgent and Refused."""
        try:
            status, content = (
                self._get_from_owner(path, query)
                if self._credentials is not None and self.base.startswith("http:")
                else self._get(path, query)
            )
            body = json.loads(content)
            if not isinstance(body, dict) or (status >= HTTPStatus.BAD_REQUEST and "error" not in body):
                raise ValueError(f"something else says {status} {content[:40]!r}")
        except ValueError as error:
            raise NoAgent(f"no agent answers at {self.base} ({error}); {_advice(self.base, error)}") from error
        if status == HTTPStatus.UNAUTHORIZED:
            raise Refused(f"{body['error']}: put USER:PASSWORD into a file and name it with --credentials-file")
        if status == HTTPStatus.NOT_FOUND:
            raise Absent(str(body["error"]))
        if status >= HTTPStatus.BAD_REQUEST:
            raise Refused(str(body["error"]))
        return body

    def _get(self, path: str, query: Mapping[str, object]) -> tuple[int, bytes]:
        import httpx

        own = self._own_certificate() if self.base.startswith("https:") else None
        try:
            answer = httpx.get(
                self.base + path,
                params=dict(query),  # type: ignore[arg-type]
                auth=self._credentials,
                verify=_context(self._ca_file, own),
                timeout=TIMEOUT_S,
                trust_env=False,
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            said = f"it {problem_of(tls)}" if (tls := _tls_error(error)) else reason(error)
            raise NoAgent(f"no agent answers at {self.base} ({said}); {_advice(self.base, error)}") from error
        return answer.status_code, answer.content

    def _own_certificate(self) -> tuple[Path, Path] | None:
        """What the agent of this node shows to others, for those that ask for a certificate."""
        with suppress(BadConfig):
            web_config = load(self.file).agent.web_config
            return client_certificate(web_config) if web_config else None
        return None

    def _get_from_owner(self, path: str, query: Mapping[str, object]) -> tuple[int, bytes]:
        """The answer of what listens on this node, if it belongs to a user who may have the password."""
        url, secret = urlsplit(self.base), ":".join(self._credentials or ())
        host, port = url.hostname or "", url.port or 80
        connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        try:
            connection.sock = connect(host, port, _owners(self.file), TIMEOUT_S)
            head = {"Authorization": f"Basic {base64.b64encode(secret.encode()).decode()}"}
            connection.request("GET", f"{url.path}{path}?{urlencode(query, doseq=True)}", headers=head)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except UntrustedError as error:
            raise NoAgent(f"the password was not sent: {error}; use https") from error
        except (OSError, http.client.HTTPException) as error:
            raise NoAgent(f"no agent answers at {self.base} ({reason(error)}); {_advice(self.base, error)}") from error
        finally:
            connection.close()

    def ask(self, path: str, **query: str | int | Sequence[str]) -> Any:
        """The agent's answer; ends the command with one sentence if there is none."""
        try:
            return self.get(path, **query)
        except (NoAgent, Refused) as error:
            fail(str(error))

    def find(self, path: str, **query: str | int | Sequence[str]) -> Any:
        """As ``ask``, and None if the agent has nothing at ``path``."""
        try:
            return self.get(path, **query)
        except Absent:
            return None
        except (NoAgent, Refused) as error:
            fail(str(error))


def _owners(file: Path | None) -> frozenset[int]:
    """Root, this user, and the owner of the state of the agent that is configured."""
    owners = {0, os.geteuid()}
    with suppress(BadConfig, OSError):
        owners.add(load(file).agent.state_dir.stat().st_uid)
    return frozenset(owners)


def _base(settings: AgentSettings) -> str:
    """The URL of an agent with these settings, from its own node; with TLS it has the name in the certificate."""
    host, _, port = settings.listen.rpartition(":")
    if settings.web_config is None or not has_tls(settings.web_config):
        return f"http://{settings.listen}"
    return f"https://{host if _is_loopback(host.strip('[]')) else settings.node}:{port}"


def _advice(base: str, error: Exception) -> str:
    """What to do about an agent at ``base`` that cannot be reached."""
    import httpx

    tls = _tls_error(error)
    if tls is not None and "_ALERT_" in (tls.reason or ""):
        return "as root of a node this shows the certificate of the node's agent, if agent.web_config has one"
    if isinstance(tls, ssl.SSLCertVerificationError):
        return "name the certificates to trust with --ca-file, and the agent with --url as its certificate does"
    if base.startswith("http:") and isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        return "if it speaks TLS, name it with --url https://NODE:PORT"
    return "start one with `opsd agent`, or name one with --url"


def _peer_credentials(file: Path | None) -> tuple[str, str] | None:
    """The content of the agent's own file, if this user may read it."""
    try:
        user, colon, password = file.read_text(encoding="utf-8").strip().partition(":") if file else ("", "", "")
    except (OSError, UnicodeDecodeError):
        return None
    return (user, password) if user and colon else None


def _credentials(file: Path | None) -> tuple[str, str] | None:
    """User and password from ``file``, or from OPSD_AGENT_CREDENTIALS. Raises click.UsageError."""
    text = os.environ.get("OPSD_AGENT_CREDENTIALS", "")
    source = "OPSD_AGENT_CREDENTIALS"
    if file is not None:
        source = str(file)
        try:
            text = file.read_text(encoding="utf-8").strip()
            mode = file.stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"{file} cannot be read: {reason(error)}") from error
        if mode & 0o077:
            raise click.UsageError(f"others may read the password in {file}: chmod 600 {file}")
    if not text:
        return None
    user, colon, password = text.partition(":")
    if not (user and colon):
        raise click.UsageError(f"{source} does not hold USER:PASSWORD")
    return user, password


def _private(base: str) -> bool:
    """True if what is sent to ``base`` is encrypted or stays on this machine."""
    url = urlsplit(base)
    return url.scheme == "https" or _is_loopback(url.hostname or "")


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "127.0.0.1", "::1")


def _tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """What TLS said, if that is why httpx raised ``error``."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error


def _context(trusted: Path | None, own: tuple[Path, Path] | None) -> ssl.SSLContext | bool:
    """What trusts the certificates in ``trusted`` and shows the ``own`` one, if this user may read its key.

    Raises click.UsageError.
    """
    if trusted is None and own is None:
        return True
    try:
        context = ssl.create_default_context(cafile=trusted)
    except OSError as error:
        raise click.UsageError(f"{trusted} holds no certificates that can be used: {reason(error)}") from error
    if own is not None:
        with suppress(OSError):
            context.load_cert_chain(*own, password=lambda: "")
    return context
