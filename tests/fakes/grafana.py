"""A Grafana that speaks enough of its HTTP API for boards to be pushed to it."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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
