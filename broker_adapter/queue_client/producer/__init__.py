"""Producers that choose a queue for each message: retries within one time budget, fault avoidance, transactions."""

from __future__ import annotations

from broker_adapter.queue_client.producer.producer import Checker, Producer, ProducerOptions, TransactionReceipt

__all__ = ["Checker", "Producer", "ProducerOptions", "TransactionReceipt"]
