"""Notifications of dead letters and of overdue messages: to a webhook, or as messages of a topic.

Imports: ``dmq.broker``, ``dmq.store``, ``dmq.config`` and below. Interface: the notifiers of a daemon and the check of
their settings.

A *source* makes the next notification, a *channel* delivers it, and a ``Notifier`` decides when. The position of a
source is durable only after the delivery, so a notification is delivered at least once. One of overdue messages is
stored before its delivery, since the messages may be delivered first.
"""

from __future__ import annotations

from dmq.notifications.notifier import Notifier, NotifierTotals
from dmq.notifications.setup import check_notifications, check_receivers, notifiers_of

__all__ = ["Notifier", "NotifierTotals", "check_notifications", "check_receivers", "notifiers_of"]
