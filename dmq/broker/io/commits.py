"""Submission of units to the store's writer; converts errors of the store to errors of the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable, Overloaded
from dmq.errors import StoreBusy, StoreError, StoreStalled
from dmq.store import Store
from dmq.store.schema.messages.index import Receipt
from dmq.store.writer.operations import Op


class Commits:
    """Submission of units, and waits for their commit. It belongs to the event loop."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def submit(self, ops: Sequence[Op], *, is_urgent: bool = True) -> asyncio.Future[list[Receipt]]:
        """Submit a unit; it commits after all units submitted before."""
        try:
            return self.store.commit_async(ops, is_urgent=is_urgent)
        except StoreError as error:
            raise refusal_of(error) from error

    async def commit(self, ops: Sequence[Op]) -> list[Receipt]:
        """Submit a unit and return its receipts once it is durable."""
        return await self.committed(self.submit(ops))

    async def flush(self) -> None:
        """Return once all units submitted before, and everything read before, are durable."""
        await self.commit([])

    async def committed(self, done: asyncio.Future[list[Receipt]]) -> list[Receipt]:
        """Return the receipts of a submitted unit once it is durable."""
        await self.wait(done)
        return done.result()

    @staticmethod
    async def wait(done: asyncio.Future[Any]) -> None:
        """Return once a submitted unit is durable; cancelling the caller does not cancel the unit."""
        done.add_done_callback(look_at)  # a store failure reaches the other callers, even if this one is cancelled
        try:
            await asyncio.shield(done)
        except StoreError as error:
            raise BrokerUnavailable(str(error)) from error


def refusal_of(error: StoreError) -> BrokerError:
    """Return the broker error for a unit that the store did not accept."""
    if isinstance(error, StoreStalled):
        return Overloaded(str(error), limit="disk")
    if isinstance(error, StoreBusy):
        return Overloaded("the store is busy", limit="pending_sends_max")
    return BrokerUnavailable(str(error))


def look_at(done: asyncio.Future[Any]) -> None:
    """Retrieve the error of a future to avoid asyncio's warning: a store failure reaches the other callers anyway."""
    if not done.cancelled():
        done.exception()
