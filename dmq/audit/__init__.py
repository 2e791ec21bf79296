"""The audit trail: what an event is, and how the outbox is read. Events are written by the store with the change itself."""

from __future__ import annotations
