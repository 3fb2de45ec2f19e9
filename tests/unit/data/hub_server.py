"""A loopback server that speaks what the hub's client asks for: HEAD and ranged GET of /resolve/. Not a test module."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PREFIX = "/datasets/karpathy/climbmix-400b-shuffle/resolve/main/"


@dataclass
class Hub:
    """Files by name, and how the hub misbehaves."""

    files: dict[str, bytes]
    cut_after: dict[str, list[int]] = field(default_factory=dict)  # bytes after which a GET's connection breaks
    wrong: dict[str, int] = field(default_factory=dict)  # how many GETs of a file give other contents
    status: dict[str, list[int]] = field(default_factory=dict)  # answers to HEAD before the right one
    claimed_size: dict[str, int] = field(default_factory=dict)  # in place of a file's true size
    gets: list[tuple[str, str]] = field(default_factory=list)  # (file, Range header)
    endpoint: str = ""


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def _file(self) -> tuple[str, bytes] | None:
            name = self.path.removeprefix(PREFIX)
            if self.path.startswith(PREFIX) and name in hub.files:
                return name, hub.files[name]
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None

        def _headers(self, status: int, data: bytes, length: int) -> None:
            digest = hashlib.sha256(data).hexdigest()
            self.send_response(status)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("X-Linked-Etag", f'"{digest}"')
            self.send_header("X-Linked-Size", str(hub.claimed_size.get(self.path.removeprefix(PREFIX), len(data))))
            self.send_header("ETag", f'"{digest}"')
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(length))

        def do_HEAD(self) -> None:
            name = self.path.removeprefix(PREFIX)
            if hub.status.get(name):
                self.send_response(hub.status[name].pop(0))
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif found := self._file():
                self._headers(200, found[1], len(found[1]))
                self.end_headers()

        def do_GET(self) -> None:
            found = self._file()
            if not found:
                return
            name, data = found
            asked = self.headers.get("Range", "")
            hub.gets.append((name, asked))
            start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
            self._headers(206 if asked else 200, data, len(data) - start)
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            body = data[start:]
            if hub.wrong.get(name, 0) > 0:
                hub.wrong[name] -= 1
                body = bytes(byte ^ 0xFF for byte in body)
            if hub.cut_after.get(name):
                self.wfile.write(body[: hub.cut_after[name].pop(0)])
                self.close_connection = True
                return
            self.wfile.write(body)

    return Handler


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve until the block ends; the port is one that is free."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
