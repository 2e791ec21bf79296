"""What a client of the daemon asks its admin service for: the one place here that knows ``dmq.admin``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dmq.admin import admin_v1 as admin_wire
from dmq.admin.client import AdminClient, CallRefused, DaemonUnavailable, NotFound
from dmq.errors import DmqError
from retry.sink import SinkError, SinkUnavailable

__all__ = ["AdminClient", "CallRefused", "NotFound", "admin", "admin_wire"]


@contextmanager
def admin(address: str, timeout_s: float) -> Iterator[AdminClient]:
    """Open a connection to the admin service; its errors are those of a sink.

    A new one each time: one that failed would wait long before it connects again.
    """
    try:
        with AdminClient(address, timeout_s=timeout_s) as client:
            yield client
    except DaemonUnavailable as error:
        raise SinkUnavailable(str(error)) from error
    except DmqError as error:
        raise SinkError(str(error)) from error
