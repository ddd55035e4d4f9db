"""The part of the model hub's HTTP interface that a download uses, for one local directory."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """Owner: one test. Mutated only by: entering and leaving its `with` block.

    Serves the files of `directory` as the model `hub_id` at `url`; everything else is 404.
    """

    def __init__(self, hub_id: str, directory: Path) -> None:
        handler = _handler(_answers(hub_id, directory))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)


def _answers(hub_id: str, directory: Path) -> dict[str, bytes]:
    """The body of every path that is served."""
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    tree = [
        {"type": "file", "path": name, "oid": hashlib.sha1(body).hexdigest(), "size": len(body)}
        for name, body in files.items()
    ]
    siblings = [{"rfilename": name} for name in files]
    model = {"_id": "0", "id": hub_id, "sha": COMMIT, "siblings": siblings, "private": False}
    return {
        f"/api/models/{hub_id}/revision/main": json.dumps(model).encode(),
        f"/api/models/{hub_id}/tree/{COMMIT}": json.dumps(tree).encode(),
        f"/api/models/{hub_id}/tree/main": json.dumps(tree).encode(),
    } | {f"/{hub_id}/resolve/{COMMIT}/{name}": body for name, body in files.items()}


def _handler(answers: dict[str, bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(self._head())

        def do_HEAD(self) -> None:
            self._head()

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output quiet."""

        def _head(self) -> bytes:
            body = answers.get(self.path.split("?")[0])
            self.send_response(404 if body is None else 200)
            if body is None:
                body = b""
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            return body

    return Handler
