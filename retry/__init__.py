"""Retry policies, the ``%RETRY%`` and ``%DLQ%`` decisions, redrive and the producer hook (to come).

``retry`` is also the name of an unrelated package on PyPI; installed into the same environment it would overwrite this
one without a word. ``DISTRIBUTION`` is how ``dmq`` tells the two apart.
"""

from __future__ import annotations

DISTRIBUTION = "rock-dmq"
