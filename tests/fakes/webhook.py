"""Receivers of messages on loopback that remember what was posted."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self


class Webhook(HTTPServer):
    """Answers every POST with ``status`` and ``answer``, and remembers it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.answer = 200, b""
        self.posts: list[dict[str, object]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/s3cret"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        self.server.posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.answer)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class Internet:
    """A proxy behind which every host takes every message, with a certificate that nobody has signed.

    ``messages`` has the host and the JSON of each.
    """

    def __init__(self, folder: Path) -> None:
        key, certificate = folder / "internet.key", folder / "internet.pem"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-subj", "/CN=internet", "-days", "2", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(command, check=True, capture_output=True)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificate, key)
        self.messages: list[tuple[str, dict[str, Any]]] = []
        self._server = _ProxyServer(self)
        self.proxy = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _ProxyServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, internet: Internet) -> None:
        super().__init__(("127.0.0.1", 0), _Proxy)
        self.internet = internet


class _Proxy(BaseHTTPRequestHandler):
    server: _ProxyServer

    def do_CONNECT(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.connection = self.server.internet.context.wrap_socket(self.connection, server_side=True)
        self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)
        self.close_connection = False

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.internet.messages.append((self.headers["Host"].partition(":")[0], content))
        self.send_response(202 if "pagerduty" in self.headers["Host"] else 200)
        self.end_headers()
        self.wfile.write(b"ok")
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""
