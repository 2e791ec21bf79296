"""A real S3 server for tests: versitygw on a directory, built at its first use."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from support.clients.official.builds import VERSITYGW, what_is_missing
from support.rigs.daemon.process import free_port

from dmq.replication.objects import ObjectStore, open_objects

BUCKET = "orders"
_ACCESS_KEY, _SECRET_KEY = "tests", "a-secret-of-tests"
_START_S_MAX = 60.0


class S3Server:
    """A running server with one bucket. ``kill`` and ``start`` keep its port and its objects."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        if missing := what_is_missing(VERSITYGW):
            assert not os.environ.get("CI"), f"required in CI: {missing}"
            pytest.skip(missing)
        self._folder = folder
        self._host = host
        self.bucket = folder / "objects" / BUCKET
        self.bucket.mkdir(parents=True)
        self.port = free_port()
        self.start()

    def start(self) -> None:
        """Start the server, and wait until it accepts connections."""
        keys = {"ROOT_ACCESS_KEY": _ACCESS_KEY, "ROOT_SECRET_KEY": _SECRET_KEY}
        address = f"{self._host}:{self.port}"
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                (VERSITYGW.cache / "versitygw", "--port", address, "--keep-alive", "--quiet", "posix", "objects"),
                cwd=self._folder,
                env=os.environ | keys,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + _START_S_MAX
        while True:
            try:
                socket.create_connection((self._host, self.port)).close()
            except OSError:
                log_text = (self._folder / "server.log").read_text(encoding="utf-8")
                assert self._process.poll() is None, log_text
                assert time.monotonic() < until, log_text
                time.sleep(0.02)
            else:
                return

    def kill(self) -> None:
        """Kill the server: connections are refused."""
        self._process.kill()
        self._process.wait()

    def environment(self, port: int | None = None) -> dict[str, str]:
        """Return the variables with which obstore finds the server, or a proxy in front of it."""
        return {
            "AWS_ACCESS_KEY_ID": _ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET_KEY,
            "AWS_ENDPOINT_URL": f"http://{self._host}:{port or self.port}",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def open(
        self, prefix: str, *, port: int | None = None, timeout_s: float = 60.0, bucket: str = BUCKET
    ) -> ObjectStore:
        """Return the objects under a prefix, read at the server or through a proxy at ``port``."""
        with patch.dict(os.environ, self.environment(port)):
            return open_objects(f"s3://{bucket}/{prefix}", timeout_s=timeout_s)
