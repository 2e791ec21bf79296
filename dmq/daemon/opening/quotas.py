"""Quotas of access keys and addresses: from the configuration, and the stored changes of operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmq.acl.quotas import RESERVE_PART, Quota, QuotaBounds, Quotas
from dmq.config.settings import DaemonConfig
from dmq.errors import StoreCorrupt
from dmq.store import Store
from dmq.store.schema.keys import META_QUOTAS, Family
from dmq.store.writer.operations import Put

if TYPE_CHECKING:
    from dmq.broker import EmbeddedBroker
    from dmq.broker.topics import Catalog
    from dmq.cluster import ClusterBroker


def quotas_of(config: DaemonConfig, broker: EmbeddedBroker, names: Catalog | ClusterBroker) -> Quotas:
    """Return the quotas of keys and addresses, with the stored changes applied. Raise ``StoreCorrupt``."""
    store = broker.store
    bounds = QuotaBounds(
        streams=config.streams_max,
        polls=config.receives_waiting_max,
        schedules=config.schedules_max,
        bytes_held=config.held_bytes_max,
        bytes_reserve=config.held_bytes_max // RESERVE_PART,
    )

    def is_known(quota: Quota, name: str) -> bool:
        match quota:
            case Quota.SCHEDULES:
                return broker.schedules.is_known(name)
            case Quota.SUBSCRIPTIONS:
                return broker.subscriptions.has(*name.split("/"))
            case _:
                return names.is_known(quota, name)

    (kept,) = store.get_many(Family.META, [META_QUOTAS])
    try:
        return Quotas(store.clock, bounds, kept or b"", is_known=is_known)
    except (ValueError, TypeError) as error:
        raise StoreCorrupt(f"the limits of keys and addresses cannot be read: {error}") from error


async def keep_quotas(store: Store, encoded: bytes) -> None:
    """Store the changed quotas, durable on return."""
    await store.commit_async([Put(Family.META, META_QUOTAS, encoded)])
