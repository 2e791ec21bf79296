"""Retry decisions that end somewhere visible, and the producer hook that loses no send.

Will hold retry policies (`policy`), the `%RETRY%` and `%DLQ%` decisions and redrive (`flow`, `dead_letter`), the
protocol of "somewhere that gives a message back later" (`sink`), and the hook for applications (`hook`).
Knows neither the store nor the transport: both arrive through the sink.
"""

from __future__ import annotations
