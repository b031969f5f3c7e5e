"""TLS: connections over it, and what is wrong with one in words. A module of its own: the library takes megabytes."""

from __future__ import annotations

import re
import socket
import ssl

from opsd.agent.web.connection import Connection, UncertifiedError

_ALERT = re.compile(r"(?:TLSV1|TLSV13|SSLV3)_ALERT_(\w+)")


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
        """Go on with the handshake. Raises UncertifiedError."""
        try:
            self._tls.do_handshake()
        except ssl.SSLError as error:
            if isinstance(error, ssl.SSLCertVerificationError) or error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
                raise UncertifiedError from error
            raise


def problem_of(error: ssl.SSLError) -> str:
    """What a client's ``error`` says about the server, as the rest of a sentence."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"has a certificate that is not accepted: {error.verify_message.rstrip('.')}"
    reason = error.reason or str(error)
    if alert := _ALERT.fullmatch(reason):
        said = alert[1].lower().replace("_", " ")
        if said in ("certificate required", "handshake failure"):
            return f"asks for a client certificate ({said})"
        return f"does not accept the client's certificate: {said}"
    return f"does not speak TLS as expected: {reason.lower().replace('_', ' ')}"
