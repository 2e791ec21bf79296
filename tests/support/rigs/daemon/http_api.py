"""A real daemon with its HTTP API, and a client of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from support.rigs.daemon.acl import Key
from support.rigs.daemon.process import START_S_MAX, Daemon

_TIMEOUT_S = 240.0  # the first request waits until the process has started, also on a loaded host


class Answer(NamedTuple):
    """An answer with its headers, by lower-case name."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:  # noqa: ANN401 - of any route
        """The body, read as JSON."""
        return json.loads(self.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A client of an API."""

    address: str

    def send(self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}) -> Answer:
        """Return the answer to a request on a connection of its own."""
        connection = HTTPConnection(self.address, timeout=_TIMEOUT_S)
        try:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return Answer(
                response.status, {name.lower(): each for name, each in response.getheaders()}, response.read()
            )
        finally:
            connection.close()

    def ask(
        self, method: str, path: str, body: object = None, *, key: Key | None = None, headers: Mapping[str, str] = {}
    ) -> Answer:
        """Return the answer to a request. ``body`` is sent as JSON; the bearer token is that of ``key``."""
        sent = dict(headers)
        if key is not None:
            sent["authorization"] = f"Bearer {key.access_key}:{key.secret_key}"
        if body is None:
            return self.send(method, path, None, sent)
        return self.send(method, path, json.dumps(body).encode(), {"content-type": "application/json", **sent})

    def done(self, method: str, path: str, body: object = None, *, key: Key | None = None) -> Any:  # noqa: ANN401
        """Return the JSON of an answer that must be a success."""
        answer = self.ask(method, path, body, key=key)
        assert answer.status in {200, 201}, answer
        return answer.json

    def refused(
        self, status: int, method: str, path: str, body: object = None, *, key: Key | None = None
    ) -> Mapping[str, Any]:
        """Return the problem of an answer that must be a refusal."""
        return problem_of(self.ask(method, path, body, key=key), status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Api(Client):
    """The API of a daemon, and the daemon."""

    daemon: Daemon


def problem_of(answer: Answer, status: int) -> Mapping[str, Any]:
    """Return the problem document of an answer."""
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/problem+json"
    problem: Mapping[str, Any] = answer.json
    assert problem["status"] == status
    return problem


@contextmanager
def api_of(data: Path, *options: str) -> Iterator[Api]:
    """Run a daemon with an HTTP API on a free port."""
    with Daemon(data, "--http-api", "127.0.0.1:0", *options) as daemon:
        url = daemon.wait_for("http_api_serving", timeout_s=START_S_MAX)["url"]
        yield Api(daemon=daemon, address=urlsplit(url).netloc)


@contextmanager
def serving(address: str, *options: str) -> Iterator[Client]:
    """Run ``dmq http-api`` for the daemon at ``address``."""
    command = [sys.executable, "-m", "dmq", "http-api", "--address", address, "--listen", "127.0.0.1:0", *options]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Client(address=urlsplit(process.stdout.readline().removeprefix("http-api ")).netloc)
        finally:
            process.terminate()
            process.communicate(timeout=_TIMEOUT_S)
    assert process.returncode == 0
