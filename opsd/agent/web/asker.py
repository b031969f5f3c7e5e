"""Asking the agent of another node. A module of its own: what it imports takes five megabytes."""

from __future__ import annotations

import base64
import http.client
import ssl
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from opsd.agent.web.access import client_certificate, has_tls
from opsd.agent.web.fleet import MAX_ANSWER, TIMEOUT_S, Answer, NodeOfJob, NodeSummary, PeerError
from opsd.agent.web.tls import problem_of
from opsd.files import read_settings
from opsd.settings.sections import AgentSettings
from opsd.words import reason

M = TypeVar("M", bound=BaseModel)


class Asker:
    """Asks agents that are configured like this one: same port, TLS if this one has it, user and password from a file.

    Where they ask for a certificate this one shows its own.

    Without TLS agents that want a password are not asked.

    Raises PeerError if the files that the settings name cannot be used.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self._port = settings.listen.rpartition(":")[2]
        tls = settings.web_config is not None and has_tls(settings.web_config)
        self._scheme = "https" if tls else "http"
        self._context = _trusting(settings.peer_ca_file, settings.web_config) if tls and settings.web_config else None
        self._headers = _authorization(settings.peer_credentials_file) if settings.web_config else {}
        self._exposed = bool(self._headers) and not tls

    def job(self, node: str, job: str) -> Answer[NodeOfJob]:
        """What the agent of ``node`` knows about ``job``."""
        return self._ask(node, f"/api/v1/jobs/{job}", NodeOfJob, "knows of no run of this job")

    def node(self, node: str, _question: str = "") -> Answer[NodeSummary]:
        """What the agent of ``node`` says of its node."""
        return self._ask(node, "/api/v1/node", NodeSummary, "is of an earlier release, which does not tell")

    def _ask(self, node: str, path: str, kind: type[M], unknown: str) -> Answer[M]:
        url = f"{self._scheme}://{node}:{self._port}"
        if self._exposed:
            return Answer(node, url, problem="is not asked: without TLS the password would go in the clear")
        try:
            status, body = self._get(node, path)
        except ssl.SSLError as error:
            return Answer(node, url, problem=problem_of(error))
        except (OSError, ValueError, http.client.HTTPException) as error:
            return Answer(node, url, problem=f"does not answer: {reason(error)}")
        if status == http.client.NOT_FOUND:
            return Answer(node, url, problem=unknown)
        try:
            return Answer(node, url, kind.model_validate_json(body))
        except ValidationError:
            return Answer(node, url, problem=f"answers what is not understood ({status})")

    def _get(self, node: str, path: str) -> tuple[int, bytes]:
        host = f"{node}:{self._port}"
        connection = (
            http.client.HTTPConnection(host, timeout=TIMEOUT_S)
            if self._context is None
            else http.client.HTTPSConnection(host, timeout=TIMEOUT_S, context=self._context)
        )
        try:
            with suppress(BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):  # the reason is read below
                connection.request("GET", path, headers=self._headers)
            answer = connection.getresponse()
            return answer.status, answer.read(MAX_ANSWER)
        finally:
            connection.close()


def _trusting(file: Path | None, web_config: Path) -> ssl.SSLContext:
    try:
        if file is not None:
            read_settings(file)  # the library would wait for ever at a pipe
        context = ssl.create_default_context(cafile=file)
    except OSError as error:
        raise PeerError(f"agent.peer_ca_file {file} holds no certificates that can be used: {reason(error)}") from error
    if own := client_certificate(web_config):
        try:
            context.load_cert_chain(*own, password=lambda: "")
        except OSError as error:
            raise PeerError(f"{own[0]} and {own[1]} cannot be used to ask other agents: {reason(error)}") from error
    return context


def _authorization(file: Path | None) -> dict[str, str]:
    if file is None:
        return {}
    try:
        user, colon, password = read_settings(file).decode().strip().partition(":")
    except (OSError, UnicodeDecodeError) as error:
        raise PeerError(f"agent.peer_credentials_file {file} cannot be read: {reason(error)}") from error
    if not (user and colon):
        raise PeerError(f"agent.peer_credentials_file {file} does not hold USER:PASSWORD")
    return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}
