"""Reports of the reason why the handler of a delivery failed (``rockdmq.consumer.v1``), for all our clients.

The report precedes the failure on the same connection, and the client does not wait for its answer. A broker that does
not store reasons refuses a report, and then gets none for ``REFUSED_S``.
"""

from __future__ import annotations

import socket
from typing import Final

from broker_adapter.wire import consumer_v1 as wire

REPORT: Final = wire.METHODS["ReportFailure"]
TIMEOUT_S: Final = 3.0  # of the call, which runs in the background
REFUSED_S: Final = 300.0
# Limits of a daemon. Longer texts are cut here, so that a huge error costs no bandwidth.
TYPE_CHARS_MAX: Final = 128
TEXT_CHARS_MAX: Final = 1024

_HOST: Final = socket.gethostname()


def report_of(group: str, receipt_handle: str, error: BaseException | str) -> wire.ReportFailureRequest:
    """Return the report of ``error``, an exception or a text that describes it. Never raises."""
    kind, text = ("", error) if isinstance(error, str) else (type(error).__name__, _text_of(error))
    return wire.ReportFailureRequest(
        group=group,
        receipt_handle=receipt_handle,
        error_type=_valid(kind[:TYPE_CHARS_MAX]),
        error_text=_valid(text[:TEXT_CHARS_MAX]),
        host=_HOST,
    )


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - __str__ of the application's class may raise any error
        return ""


def _valid(text: str) -> str:
    """Replace characters that UTF-8 cannot encode: protobuf refuses lone surrogates."""
    return text.encode("utf-8", "replace").decode()
