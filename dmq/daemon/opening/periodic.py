"""Periodic work of a daemon: retention, snapshots, backups, notifications."""

from __future__ import annotations

from contextlib import AsyncExitStack

from dmq.admin.operations.daemon import Backups, PeriodicBackups, RunningDaemon, rule_of
from dmq.broker import EmbeddedBroker
from dmq.config.settings import DaemonConfig
from dmq.metrics.registry import Metrics
from dmq.notifications import notifiers_of
from dmq.recovery import BackupFolder, Snapshots
from dmq.store import Store


async def backups_of(
    config: DaemonConfig, store: Store, stack: AsyncExitStack
) -> tuple[Backups, PeriodicBackups | None]:
    """Return the on-demand backups, and the periodic ones if configured, which are not started yet."""
    backups = Backups(store, config.data)
    stack.push_async_callback(backups.close)
    rule = rule_of(config)
    if rule is None or config.backup_dir is None:
        return backups, None
    folder = BackupFolder(config.backup_dir.absolute(), store.identity.number)
    periodic = PeriodicBackups(store, backups, rule, folder, config.backups_kept)
    stack.push_async_callback(periodic.close)
    await periodic.open()
    return backups, periodic


def start_periodic(
    broker: EmbeddedBroker, snapshots: Snapshots | None = None, periodic: PeriodicBackups | None = None
) -> None:
    """Start the periodic work on the store of a daemon or an embedded broker."""
    broker.retention.start()
    broker.index_builds.start()
    if snapshots is not None:
        snapshots.start(broker.subscriptions)
    if periodic is not None:
        periodic.start()


def start_notifications(cell: RunningDaemon, metrics: Metrics, stack: AsyncExitStack) -> None:
    """Start the configured notifications. ``stack`` ends them."""
    notifiers = notifiers_of(cell.config, cell.broker)
    cell.say_notifications = lambda: next((each.problem for each in notifiers if each.problem), "")
    metrics.notifications.follow(lambda: {each.kind: each.totals for each in notifiers})
    for each in notifiers:
        stack.push_async_callback(each.close)
        each.start()
