"""Deliveries to consumers: receive, acknowledge, extend, return, lease expiry.

Imports: failures, filters, groups, limits and below. Interface: deliveries, dispatch, lease expiry.
"""

from __future__ import annotations

from dmq.broker.deliveries.deliveries import Deliveries, ForwardedMessage
from dmq.broker.deliveries.dispatch import LOOK_BYTES_MAX, LOOK_MAX, RECEIVE_BYTES_MAX, facts_of
from dmq.broker.deliveries.lease_expiry import Leases

__all__ = ["LOOK_BYTES_MAX", "LOOK_MAX", "RECEIVE_BYTES_MAX", "Deliveries", "ForwardedMessage", "Leases", "facts_of"]
