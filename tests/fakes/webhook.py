"""Servers on loopback: receivers of messages, a Grafana, and one that was not expected.

Receivers of messages on loopback that remember what was posted.
"""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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


# A Grafana that speaks enough of its HTTP API for boards to be pushed to it.


TOKEN = "glsa_good"


class FakeGrafana:
    """Keeps folders and boards; ``fail`` maps "METHOD /path" to a status that it answers instead."""

    def __init__(self, version: str = "12.1.0") -> None:
        self.version = version
        self.folders: dict[str, str] = {}
        self.boards: dict[str, dict[str, Any]] = {}
        self.fail: dict[str, int] = {}
        self.writes: list[str] = []
        self.annotations: list[dict[str, Any]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(*fake.get(self.path, self.headers.get("Authorization", "")))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply(*fake.post(self.path, body, self.headers.get("Authorization", "")))

            def do_PATCH(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply(*fake.patch(self.path, body, self.headers.get("Authorization", "")))

            def reply(self, status: int, body: object) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def get(self, path: str, authorization: str) -> tuple[int, object]:
        if status := self.fail.get(f"GET {path}"):
            return status, {"message": "no"}
        if authorization != f"Bearer {TOKEN}":
            return 401, {"message": "Unauthorized"}
        if path == "/api/frontend/settings":
            return 200, {"buildInfo": {"version": self.version}}
        kind, _, uid = path.removeprefix("/api/").rpartition("/")
        if kind == "folders" and uid in self.folders:
            return 200, {"uid": uid, "title": self.folders[uid]}
        if kind == "dashboards/uid" and uid in self.boards:
            return 200, self.boards[uid]
        return 404, {"message": "not found"}

    def post(self, path: str, body: dict[str, Any], authorization: str) -> tuple[int, object]:
        if status := self.fail.get(f"POST {path}"):
            return status, {"message": "no"}
        if authorization != f"Bearer {TOKEN}":
            return 401, {"message": "Unauthorized"}
        if path == "/api/annotations":
            self.annotations.append(body)
            return 200, {"message": "Annotation added", "id": len(self.annotations)}
        if path == "/api/folders":
            self.folders[body["uid"]] = body["title"]
            self.writes.append(f"folder {body['uid']}")
            return 200, body
        board, uid = body["dashboard"], body["dashboard"]["uid"]
        before = self.boards.get(uid, {"dashboard": {"version": 0}})["dashboard"]["version"]
        self.boards[uid] = {
            "dashboard": {**board, "id": len(self.boards) + 1, "version": before + 1},
            "meta": {"folderUid": body["folderUid"]},
        }
        self.writes.append(uid)
        return 200, {"uid": uid, "version": before + 1}

    def patch(self, path: str, body: dict[str, Any], authorization: str) -> tuple[int, object]:
        if authorization != f"Bearer {TOKEN}":
            return 401, {"message": "Unauthorized"}
        self.annotations[int(path.rpartition("/")[2]) - 1].update(body)
        return 200, {"message": "Annotation patched"}


# A server that is not the one that was expected.


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The address of something that answers one request with ``answer``."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
