"""A connection over TLS. A module of its own: the library takes three megabytes, which few agents need."""

from __future__ import annotations

import socket
import ssl

from opsd.agent.web.connection import Connection


class TlsConnection(Connection):
    """A connection whose handshake is done on the way."""

    try_read_again = (BlockingIOError, ssl.SSLWantReadError)
    try_write_again = (BlockingIOError, ssl.SSLWantWriteError)
    want_read = (ssl.SSLWantReadError,)
    want_write = (ssl.SSLWantWriteError,)
    malformed = (ssl.SSLError,)

    def __init__(self, raw: socket.socket, peer: str, context: ssl.SSLContext, now: float) -> None:
        super().__init__(raw, peer, now)
        self._tls = self.socket = context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)

    def handshake(self) -> None:
        """Go on with the handshake."""
        self._tls.do_handshake()
