"""Notifiers of a daemon from its settings, and the checks of these settings."""

from __future__ import annotations

from dmq.broker import EmbeddedBroker
from dmq.config.destinations import Destination, NotificationTopic, WebhookUrl
from dmq.config.settings import DaemonConfig
from dmq.notifications.channels import Channel, TopicChannel, WebhookChannel
from dmq.notifications.notifier import Notifier
from dmq.notifications.post import resolve
from dmq.notifications.signature import read_secrets
from dmq.notifications.sources import DeadLetterSource, OverdueSource


def notifiers_of(config: DaemonConfig, broker: EmbeddedBroker) -> list[Notifier]:
    """Return the notifiers that are configured, which are not started."""
    both = (config.on_dead_letter, config.on_overdue)
    own_topics = frozenset(each.name for each in both if isinstance(each, NotificationTopic))
    every_s, clock = config.notification_every.total_seconds(), broker.store.clock
    found: list[Notifier] = []
    if config.on_dead_letter is not None:
        letters = DeadLetterSource(broker, own_topics)
        channel = _channel(config, config.on_dead_letter, broker)
        found.append(Notifier("dead_letter", letters, channel, clock, every_s=every_s))
    if config.on_overdue is not None:
        after_ms = int(config.overdue_after.total_seconds() * 1000)
        overdue = OverdueSource(broker, own_topics, after_ms, every_ms=int(every_s * 1000))
        channel = _channel(config, config.on_overdue, broker)
        found.append(Notifier("overdue", overdue, channel, clock, every_s=every_s))
    return found


def _channel(config: DaemonConfig, destination: Destination, broker: EmbeddedBroker) -> Channel:
    if isinstance(destination, NotificationTopic):
        return TopicChannel(broker, destination.name)
    assert config.webhook_secret_file is not None, "the settings are checked"
    return WebhookChannel(
        broker, destination, config.webhook_secret_file, allows_private=config.webhook_private_addresses
    )


def check_notifications(config: DaemonConfig) -> None:
    """Raise ``DmqError`` if the secret of webhooks cannot be used."""
    if config.webhook_secret_file is not None:
        read_secrets(config.webhook_secret_file)


def check_receivers(config: DaemonConfig) -> None:
    """Raise ``DmqError`` if the host of a URL is unknown, or has an address that is not allowed."""
    for each in {config.on_dead_letter, config.on_overdue}:
        if isinstance(each, WebhookUrl):
            resolve(each, allows_private=config.webhook_private_addresses)
