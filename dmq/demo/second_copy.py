"""Second copy of the demo's store: on an S3 server of this host if versitygw is installed, otherwise in a directory."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_BUCKET = "demo"
_ACCESS_KEY, _SECRET_KEY = "demo", "only-for-the-demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondCopy:
    """Place of the second copy. ``server`` is the command of its server, which listens on ``port``; empty: none."""

    url: str
    server: tuple[str, ...] = ()
    port: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def description(self) -> str:
        """Kind of the place."""
        return f"the S3 server at 127.0.0.1:{self.port}" if self.server else "a directory (no versitygw in PATH)"

    def is_reachable(self) -> bool:
        """Return True if the server accepts connections, or if there is no server."""
        if not self.server:
            return True
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False


def make_second_copy(folder: Path, port: int) -> SecondCopy:
    """Create an empty bucket in ``folder``, and return its place. The caller starts the server."""
    bucket = folder / "objects" / _BUCKET
    bucket.mkdir(parents=True)
    program = shutil.which("versitygw")
    if program is None:
        return SecondCopy(url=f"file://{bucket}")
    address = f"127.0.0.1:{port}"
    environment = {
        "ROOT_ACCESS_KEY": _ACCESS_KEY,
        "ROOT_SECRET_KEY": _SECRET_KEY,
        "AWS_ACCESS_KEY_ID": _ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": _SECRET_KEY,
        "AWS_ENDPOINT_URL": f"http://{address}",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    server = (program, "--port", address, "--keep-alive", "--quiet", "posix", str(bucket.parent))
    return SecondCopy(url=f"s3://{_BUCKET}/store", server=server, port=port, environment=environment)
