"""The audit trail: the events, and the reader of the outbox. The store writes each event in the batch of its change."""

from __future__ import annotations
