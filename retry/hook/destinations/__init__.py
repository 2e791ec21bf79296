"""Destinations of messages: whether an attempt may begin now.

Imports: verdicts and the runtime. Interface: a destination with its permits, and the plain rules that it combines:
circuit breaker, outage rule, ramp.
"""

from __future__ import annotations

from retry.hook.destinations.breaker import Breaker, BreakerState
from retry.hook.destinations.destination import Destination, Permit
from retry.hook.destinations.ramp import Ramp

__all__ = ["Breaker", "BreakerState", "Destination", "Permit", "Ramp"]
