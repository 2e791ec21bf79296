"""Synchronous client of the admin service, for the command line and the hook.

Imports: requests and ``dmq.admin.admin_v1``. Interface: ``AdminClient`` with its errors, its channel, rates of totals.
"""

from __future__ import annotations

from dmq.admin.client.channel import open_async_channel, open_channel, told_of_tls
from dmq.admin.client.client import (
    AdminClient,
    CallFailed,
    CallRefused,
    DaemonUnavailable,
    NotAllowed,
    NotFound,
)
from dmq.admin.client.rates import Sample, rates_of, sample_of

__all__ = [
    "AdminClient",
    "CallFailed",
    "CallRefused",
    "DaemonUnavailable",
    "NotAllowed",
    "NotFound",
    "Sample",
    "open_async_channel",
    "open_channel",
    "rates_of",
    "sample_of",
    "told_of_tls",
]
