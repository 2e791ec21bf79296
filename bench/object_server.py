"""An object store in memory whose conditional puts take a given time: S3, as far as the replication log uses it.

``python -m bench.object_server PUT_MS`` prints its port and serves until its input ends.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

BUCKET = "bench"


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, put_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.put_s = put_s
        self.rows: dict[str, bytes] = {}
        self.lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_PUT(self) -> None:
        data, name = self._body(), self._name()
        time.sleep(self.server.put_s)
        with self.server.lock:
            found = self.server.rows.get(name)
            wanted = self.headers.get("If-Match")
            is_refused = found is not None if self.headers.get("If-None-Match") else False
            if is_refused or (wanted is not None and (found is None or _etag(found) != wanted)):
                self._reply(412, _error("PreconditionFailed"))
                return
            self.server.rows[name] = data
        self._reply(200, b"", etag=_etag(data))

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            self._list(query.get("prefix", [""])[0], query.get("start-after", [""])[0])
            return
        found = self.server.rows.get(self._name())
        if found is None:
            self._reply(404, _error("NoSuchKey"))
        else:
            self._reply(200, found, etag=_etag(found))

    def do_POST(self) -> None:
        for each in ET.fromstring(self._body()).iter():
            if each.tag.endswith("Key"):
                self.server.rows.pop(each.text or "", None)
        self._reply(200, b"<DeleteResult></DeleteResult>")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - name of http.server
        """Log nothing."""

    def _list(self, prefix: str, after: str) -> None:
        with self.server.lock:
            found = sorted((name, data) for name, data in self.server.rows.items() if name.startswith(prefix))
        rows = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(_etag(data))}</ETag><Size>{len(data)}</Size></Contents>"
            for name, data in found
            if name > after
        )
        self._reply(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode())

    def _name(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", "0")))

    def _reply(self, status: int, body: bytes, *, etag: str = "") -> None:
        self.send_response(status)
        if etag:
            self.send_header("ETag", etag)
            self.send_header("Last-Modified", formatdate(usegmt=True))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


@contextmanager
def running(put_ms: int) -> Iterator[dict[str, str]]:
    """Run a server for a while; yield the environment with which a daemon finds it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.object_server", str(put_ms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield {
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{process.stdout.readline().strip()}",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
    finally:
        process.communicate()


if __name__ == "__main__":
    _served = _Server(int(sys.argv[1]) / 1000)
    threading.Thread(target=_served.serve_forever, daemon=True).start()
    print(_served.server_address[1], flush=True)
    sys.stdin.read()
