"""JSON to a web service, with the standard library: an HTTP package takes 18 MiB of the agent's memory."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any

from opsd.threads import Deadlines
from opsd.words import unformatted

MAX_ANSWER = 1 << 20
_DEADLINES = Deadlines()


class _Limited(http.client.HTTPConnection):
    """A connection that is cut off once its timeout has passed since its making.

    The timeout of a socket begins again with each byte that arrives.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._over = False
        if self.timeout is not None:
            _DEADLINES.after(self.timeout, self._cut)

    def connect(self) -> None:
        super().connect()
        if self._over:
            self.close()
            raise TimeoutError("no connection in time")

    def _cut(self) -> None:
        self._over, connected = True, self.sock
        if connected is not None:  # neither closed nor still to come
            with suppress(OSError):
                socket.socket.shutdown(connected, socket.SHUT_RDWR)  # of a TLS socket the connection below


class _LimitedTls(_Limited, http.client.HTTPSConnection):
    pass


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Limited, req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_LimitedTls, context=_trust()), req)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Answer a redirect as what it is: a body would not go with it."""


def send_json(
    method: str, url: str, body: object, timeout_s: float, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """Status and content of the answer, of a redirect as well, within ``timeout_s`` altogether.

    Goes through the proxies that the environment names. Looking up a name takes as long as the resolver lets it.
    Texts in ``body`` become ``words.unformatted``: users write part of them, and chats and boards show their markup.

    Raises OSError, ValueError and http.client.HTTPException.
    """
    head = {"Content-Type": "application/json", "User-Agent": "opsd", **(headers or {})}
    request = urllib.request.Request(url, json.dumps(_unformatted(body)).encode(), head, method=method)  # noqa: S310
    opener = urllib.request.build_opener(_NoRedirects, _HttpHandler, _HttpsHandler)
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return answer.status, answer.read(MAX_ANSWER)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""


def _unformatted(value: Any) -> Any:
    if isinstance(value, str):
        return unformatted(value)
    if isinstance(value, Mapping):
        return {key: _unformatted(item) for key, item in value.items()}
    return [_unformatted(item) for item in value] if isinstance(value, list | tuple) else value


@cache
def _trust() -> ssl.SSLContext:
    """The certificates of the system, or those of certifi where the system has none."""
    found = ssl.get_default_verify_paths()
    if found.cafile or found.capath:
        return ssl.create_default_context()
    import certifi

    return ssl.create_default_context(cafile=certifi.where())
