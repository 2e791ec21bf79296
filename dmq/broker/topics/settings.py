"""Changes of topic settings by operators: retention, delivery rate, quotas and indexed properties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from broker_adapter.contracts.errors import Refused, Rule
from dmq.config.units import DURATION_MS_MAX
from dmq.store.schema.keys import HELD_TOPIC_ID_MAX
from dmq.store.schema.topics.names import Keep, TopicQuotas

if TYPE_CHECKING:
    from dmq.broker.topics.registry import Topic

KEEP_TIME_MS_LEAST = 1_000
BACK = -1


class KeepChange(NamedTuple):
    """Change of a ``Keep``: ``None`` leaves a field unchanged, ``BACK`` and "default" reset it to the configuration."""

    time_ms: int | None = None
    size_bytes: int | None = None
    unread: Literal["yes", "no", "default"] | None = None

    def applied_to(self, keep: Keep) -> Keep:
        """Return ``keep`` with the changes; raise ``Refused(REQUEST)`` for an invalid value."""
        if not (self.time_ms in {None, 0, BACK} or KEEP_TIME_MS_LEAST <= (self.time_ms or 0) <= DURATION_MS_MAX):
            limit = f"{KEEP_TIME_MS_LEAST} to {DURATION_MS_MAX} ms"
            raise Refused(Rule.REQUEST, "the keep time is out of range", value=self.time_ms, limit=limit)
        if self.size_bytes is not None and not BACK <= self.size_bytes < 2**63:
            raise Refused(Rule.REQUEST, "the number of bytes to keep is out of range", value=self.size_bytes)
        return Keep(
            _bound(self.time_ms, keep.time_ms),
            _bound(self.size_bytes, keep.size_bytes),
            keep.unread if self.unread is None else {"yes": True, "no": False, "default": None}[self.unread],
        )


def _bound(change: int | None, before: int | None) -> int | None:
    return before if change is None else None if change == BACK else change


KEEP_STAYS = KeepChange()
DELIVER_RATE_MAX = 1_000_000


class FlowChange(NamedTuple):
    """Change of the pause and the delivery rate of a topic or a group.

    ``None`` leaves a field unchanged; rate 0 removes the limit.
    """

    is_paused: bool | None = None
    deliver_rate: int | None = None

    def applied_to(self, topic: Topic, now_ms: int) -> Topic:
        """Return ``topic`` with the changes; raise ``Refused(REQUEST)`` for an invalid value."""
        self.check()
        rate = self.deliver_rate
        if (self.is_paused or rate) and topic.topic_id > HELD_TOPIC_ID_MAX:
            why = f"the topic has an id above {HELD_TOPIC_ID_MAX} and cannot hold messages"
            raise Refused(Rule.REQUEST, why, value=topic.name)
        return topic._replace(
            paused_since_ms=paused_since(topic.paused_since_ms, self.is_paused, now_ms),
            deliver_rate=topic.deliver_rate if rate is None else rate or None,
        )

    def check(self) -> None:
        """Raise ``Refused(REQUEST)`` for an invalid rate."""
        if self.deliver_rate is not None and not 0 <= self.deliver_rate <= DELIVER_RATE_MAX:
            limit = f"1 to {DELIVER_RATE_MAX} messages a second, 0: no limit"
            raise Refused(Rule.REQUEST, "the delivery rate is out of range", value=self.deliver_rate, limit=limit)

    def said(self) -> str:
        """Return the text of the change for the audit trail."""
        said = {True: "paused", False: "resumed", None: ""}[self.is_paused]
        rate = f"deliver_rate={self.deliver_rate}" if self.deliver_rate is not None else ""
        return " ".join(filter(None, (said, rate)))


def paused_since(before_ms: int | None, is_paused: bool | None, now_ms: int) -> int | None:
    """Return the start of a pause; pausing again keeps the earlier start."""
    if is_paused is None:
        return before_ms
    return (now_ms if before_ms is None else before_ms) if is_paused else None


FLOW_STAYS = FlowChange()
PENDING_MAX = 2**40  # messages
SEND_RATE_MAX = 1_000_000


class QuotaChange(NamedTuple):
    """Change of topic quotas: ``None`` leaves one unchanged, ``BACK`` resets it to the configuration, 0 removes it."""

    max_pending: int | None = None
    max_pending_bytes: int | None = None
    send_rate: int | None = None

    def applied_to(self, quotas: TopicQuotas) -> TopicQuotas:
        """Return ``quotas`` with the changes; raise ``Refused(REQUEST)`` for an invalid value."""
        for what, value, most in (
            ("number of messages that may be pending", self.max_pending, PENDING_MAX),
            ("number of bytes that may be pending", self.max_pending_bytes, 2**63 - 1),
            ("send rate", self.send_rate, SEND_RATE_MAX),
        ):
            if value is not None and not BACK <= value <= most:
                limit = f"1 to {most}, 0: no limit, {BACK}: as configured"
                raise Refused(Rule.REQUEST, f"the {what} is out of range", value=value, limit=limit)
        return TopicQuotas(*(_bound(change, before) for change, before in zip(self, quotas, strict=True)))

    def said(self) -> str:
        """Return the text of the change for the audit trail."""
        told = {name: value for name, value in self._asdict().items() if value is not None}
        return " ".join(f"{name}={'default' if value == BACK else value}" for name, value in told.items())


QUOTAS_STAY = QuotaChange()
INDEX_PROPERTIES_MAX = 8
_PROPERTY_NAME_BYTES_MAX = 255


class IndexChange(NamedTuple):
    """Change of a topic's indexed properties: the names to add and those to remove."""

    added: Sequence[str] = ()
    removed: Sequence[str] = ()

    def applied_to(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the names after the change, sorted; raise ``Refused(REQUEST)`` for an invalid name or too many."""
        for name in self.added:
            if not name.isprintable() or "=" in name or not 0 < len(name.encode()) <= _PROPERTY_NAME_BYTES_MAX:
                limit = f"1 to {_PROPERTY_NAME_BYTES_MAX} bytes of printable text without '='"
                raise Refused(Rule.REQUEST, "not the name of a property to index", value=name, limit=limit)
        for name in self.removed:
            if name not in names or name in self.added:
                why = "the property is to be indexed, too" if name in self.added else "the property is not indexed"
                raise Refused(Rule.REQUEST, why, value=name, limit=", ".join(names))
        changed = {*names, *self.added} - set(self.removed)
        if len(changed) > INDEX_PROPERTIES_MAX:
            why = "too many indexed properties in one topic"
            raise Refused(Rule.REQUEST, why, value=len(changed), limit=INDEX_PROPERTIES_MAX)
        return tuple(sorted(changed))

    def said(self) -> str:
        """Return the text of the change for the audit trail."""
        told = [("index_property", self.added), ("no_index_property", self.removed)]
        return " ".join(f"{key}={','.join(names)}" for key, names in told if names)


INDEX_STAYS = IndexChange()
