"""Clients of the classic protocol that divide queues among themselves, served in this process.

Imports: pulling, deliveries and below. Interface: clients, message conversion, send-back.
"""

from __future__ import annotations

from dmq.broker.classic.clients import ClassicClients
from dmq.broker.classic.messages import BROKER, CHECK_AFTER_S, PRODUCER_GROUP, envelope_of, received_of
from dmq.broker.classic.send_back import SentBackMessages

__all__ = [
    "BROKER",
    "CHECK_AFTER_S",
    "PRODUCER_GROUP",
    "ClassicClients",
    "SentBackMessages",
    "envelope_of",
    "received_of",
]
