"""A run in which all official clients speak TLS: what daemons show, and what clients that check are to trust."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import grpc
from support.effort import TLS

from dmq.rocketmq_server.transport.tls import self_signed


def of_daemon() -> dict[str, str]:
    """Return what a daemon is told in such a run; nothing in others."""
    if TLS != "on":
        return {}
    certificate, key = _made()
    return {"DMQ_TLS_CERTIFICATE": str(certificate), "DMQ_TLS_KEY": str(key)}


def of_client() -> dict[str, str]:
    """Return what a client is told in such a run: grpcio and grpc-js look here. Go and Java trust everybody."""
    return {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(_made()[0])} if TLS == "on" else {}


def channel(address: str, options: Sequence[tuple[str, int]]) -> grpc.Channel:
    """Return grpcio's channel to a daemon, over TLS in such a run."""
    if TLS != "on":
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(_made()[0].read_bytes()), options=options)


@cache
def _made() -> tuple[Path, Path]:
    folder = Path(tempfile.mkdtemp(prefix="dmq-tls-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return self_signed(folder, time.time_ns() // 1_000_000)
