"""The audit trail: what an event is, and how the outbox is read. The store writes events with the change itself."""

from __future__ import annotations
