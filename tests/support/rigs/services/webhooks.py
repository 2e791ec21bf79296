"""A receiver of webhooks: a real HTTP server in a thread, which answers as a test says and keeps every request."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()
OTHER_SECRET = "whsec_" + base64.b64encode(b"fedcba9876543210fedcba9876543210").decode()
PATIENCE_S = 30.0
OK = b"HTTP/1.1 204 No Content\r\n\r\n"


class Webhook(NamedTuple):
    """A request, as it came."""

    line: str
    headers: dict[str, str]  # lower case
    body: bytes

    @property
    def data(self) -> Any:  # noqa: ANN401 - JSON
        """The content of the notification."""
        return json.loads(self.body)["data"]


def answer(status: int, *lines: str) -> bytes:
    """Return an answer with a status and header lines."""
    return "\r\n".join([f"HTTP/1.1 {status} Answer", *lines, "Content-Length: 0", "", ""]).encode()


def is_signed(webhook: Webhook, secret: str = SECRET) -> bool:
    """Verify a signature as the Standard Webhooks specification has it; written without the product's code."""
    key = base64.b64decode(secret.split("_", 1)[1])
    signed = b".".join(
        [webhook.headers["webhook-id"].encode(), webhook.headers["webhook-timestamp"].encode(), webhook.body]
    )
    expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return any(hmac.compare_digest(each, f"v1,{expected}") for each in webhook.headers["webhook-signature"].split(" "))


class Receiver:
    """The server. ``answers`` are used up one by one; after them each request gets 204."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.answers: queue.SimpleQueue[bytes | Callable[[socket.socket], None]] = queue.SimpleQueue()
        self.webhooks: queue.SimpleQueue[Webhook] = queue.SimpleQueue()
        self.connections = 0
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"{'https' if context is not None else 'http'}://127.0.0.1:{self.port}/hooks"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Close the port."""
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes up the thread, which holds the port
        self._listener.close()

    def next(self) -> Webhook:
        """Return the next request, waiting for it."""
        return self.webhooks.get(timeout=PATIENCE_S)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._handle, args=(connection,), daemon=True).start()

    def _handle(self, connection: socket.socket) -> None:
        try:
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_side=True)
            self.webhooks.put(_read(connection))
            chosen = self.answers.get_nowait() if not self.answers.empty() else OK
            if isinstance(chosen, bytes):
                connection.sendall(chosen)
            else:
                chosen(connection)
        except (OSError, EOFError):
            pass
        finally:
            connection.close()


def _read(connection: socket.socket) -> Webhook:
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        if not part:
            raise EOFError
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    line, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
    while len(body) < int(headers["content-length"]):
        body += connection.recv(65536)
    return Webhook(line, headers, body)


@contextmanager
def receiving(context: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """A receiver that is there while the block runs."""
    receiver = Receiver(context)
    try:
        yield receiver
    finally:
        receiver.close()


def secret_file(folder: Path, *secrets: str) -> Path:
    """Write a file of secrets."""
    path = folder / "webhook-secret"
    path.write_text("\n".join(secrets or (SECRET,)) + "\n", encoding="utf-8")
    path.chmod(0o600)
    return path
