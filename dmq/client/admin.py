"""The client's calls to the admin service: the only module of the package that imports ``dmq.admin``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dmq.admin import admin_v1 as admin_wire
from dmq.admin.client import AdminClient, CallRefused, DaemonUnavailable, NotFound, open_channel, told_of_tls
from dmq.errors import DmqError
from retry.sink import SinkError, SinkUnavailable

if TYPE_CHECKING:
    from dmq.client.calls import DaemonCalls

__all__ = ["AdminClient", "CallRefused", "NotFound", "admin", "admin_wire", "open_channel", "told_of_tls"]


@contextmanager
def admin(calls: DaemonCalls) -> Iterator[AdminClient]:
    """Open a connection to the admin service of the daemon of ``calls``; its errors are raised as sink errors.

    Each use opens a new connection, because a failed one would wait for long before it reconnects.
    """
    try:
        with AdminClient(calls.address, timeout_s=calls.timeout_s, signer=calls.signer, tls=calls.tls) as client:
            yield client
    except DaemonUnavailable as error:
        raise SinkUnavailable(str(error)) from error
    except DmqError as error:
        raise SinkError(str(error)) from error
