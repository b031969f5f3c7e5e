"""JSON to a web service, with the standard library: an HTTP package takes 18 MiB of the agent's memory."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import cache
from typing import Any

from opsd.words import unformatted

MAX_ANSWER = 1 << 20


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Answer a redirect as what it is: a body would not go with it."""


def send_json(
    method: str, url: str, body: object, timeout_s: float, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """Status and content of the answer, of a redirect as well. Goes through the proxies that the environment names.

    Texts in ``body`` become ``words.unformatted``: users write part of them, and chats and boards show their markup.

    Raises OSError, ValueError and http.client.HTTPException.
    """
    head = {"Content-Type": "application/json", "User-Agent": "opsd", **(headers or {})}
    request = urllib.request.Request(url, json.dumps(_unformatted(body)).encode(), head, method=method)  # noqa: S310
    handlers = [_NoRedirects(), *([urllib.request.HTTPSHandler(context=_trust())] if request.type == "https" else [])]
    opener = urllib.request.build_opener(*handlers)
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
