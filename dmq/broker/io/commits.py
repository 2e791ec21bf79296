"""The broker's units of work on their way to the store's writer, with the store's errors told as a broker's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable, Overloaded
from dmq.errors import StoreBusy, StoreError, StoreStalled
from dmq.store.schema.index import Receipt
from dmq.store.store import Store
from dmq.store.writer.operations import Append, Op, Schedule
from dmq.store.writer.writer import Told, Unit


class Commits:
    """Submits units and waits for them. Belongs to the event loop."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def submit(self, ops: Sequence[Op], *, is_urgent: bool = True) -> asyncio.Future[list[Receipt]]:
        """Submit a unit: it is committed behind everything submitted before it."""
        try:
            return self.store.commit_async(ops, is_urgent=is_urgent)
        except StoreError as error:
            raise _not_taken(error) from error

    def submit_then(self, ops: Sequence[Op], settle: Callable[[Unit], None]) -> None:
        """Submit a unit that is not urgent and have ``settle`` called with it on the loop."""
        try:
            self.store.commit_then(ops, settle)
        except StoreError as error:
            raise _not_taken(error) from error

    def submit_one(self, op: Schedule | Append, told: Told) -> None:
        """As ``submit_then``, of a message that is sent alone; ``told`` gets its receipt, or the error."""
        try:
            self.store.commit_one(op, told)
        except StoreError as error:
            raise _not_taken(error) from error

    async def commit(self, ops: Sequence[Op]) -> list[Receipt]:
        """Submit a unit and return its receipts once it is durable."""
        return await self.committed(self.submit(ops))

    async def flush(self) -> None:
        """Return once everything submitted before is durable, and all that was read before as well."""
        await self.commit([])

    async def committed(self, done: asyncio.Future[list[Receipt]]) -> list[Receipt]:
        """Return the receipts of a submitted unit once it is durable."""
        await self.wait(done)
        return done.result()

    @staticmethod
    async def wait(done: asyncio.Future[Any]) -> None:
        """Return once what was submitted is durable; a caller that goes away does not undo it."""
        done.add_done_callback(look_at)  # its failure reaches everybody else too, should the caller go away
        try:
            await asyncio.shield(done)
        except StoreError as error:
            raise BrokerUnavailable(str(error)) from error


def _not_taken(error: StoreError) -> BrokerError:
    if isinstance(error, StoreStalled):
        return Overloaded(str(error), limit="disk")
    if isinstance(error, StoreBusy):
        return Overloaded("the store is busy", limit="pending_sends_max")
    return BrokerUnavailable(str(error))


def look_at(done: asyncio.Future[Any]) -> None:
    """Take note of a failure that reaches everybody else anyway."""
    if not done.cancelled():
        done.exception()
