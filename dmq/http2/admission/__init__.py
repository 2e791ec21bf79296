"""Admission and bounds: connections, calls, held bytes, and the order in which clients are read.

Imports: ``dmq.http2.codec`` and below. Interface: all modules, one decision each; ``limits`` has all of their figures.
"""

from __future__ import annotations

from pkgutil import extend_path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmq.http2.admission import admission, backpressure, bounds, connection_admission, limits, slices  # noqa: TC004 - namespaces

__all__ = ["admission", "backpressure", "bounds", "connection_admission", "limits", "slices"]
__path__ = extend_path(__path__, __name__)[::-1]  # compiled modules first
