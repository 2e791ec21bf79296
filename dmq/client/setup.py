"""Preparation of a type in the daemon before its first message: group, retry policy, topic and subscription."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.client.admin import NotFound, admin, admin_wire
from dmq.client.calls import DaemonCalls
from dmq.client.entries import GROUP
from retry.policy import MAX_ATTEMPTS_LIMIT
from retry.sink import SinkError

log = structlog.get_logger("dmq.client")

Then = Callable[[SinkError | None], None]

# The hook decides when an entry is dead. Each failure requests its own delay, so this one is never used.
_POLICY = admin_wire.Policy(fixed=admin_wire.FixedBackoff(delay_ms=0), max_attempts=MAX_ATTEMPTS_LIMIT)


class Setup:
    """Preparation of topics, once each, and again after an outage: the daemon may have returned with an empty store."""

    def __init__(self, calls: DaemonCalls, timeout_s: float) -> None:
        self._calls = calls
        self._timeout_s = timeout_s
        self._lock = threading.Condition()
        self._topics: set[str] = set()
        self._has_group = False
        self._waiting: dict[str, list[Then]] = {}
        self._telling = 0

    def close(self) -> None:
        """Wait, up to the deadline of a call, until all callbacks of pending preparations have run."""
        with self._lock:
            self._lock.wait_for(lambda: not self._waiting and not self._telling, self._timeout_s)

    def reset(self) -> None:
        """Prepare the group and all topics again at their next use."""
        with self._lock:
            self._has_group = False
            self._topics.clear()

    def prepare(self, topic: str, then: Then) -> None:
        """Call ``then`` when the topic is ready: now, or in another thread."""
        with self._lock:
            is_ready = topic in self._topics
            if not is_ready:
                waiting = self._waiting.setdefault(topic, [])
                waiting.append(then)
                if len(waiting) > 1:
                    return
        if is_ready:
            then(None)
        else:
            threading.Thread(target=self._work, args=(topic,), name="dmq-sidecar-setup", daemon=True).start()

    def prepare_now(self, topic: str) -> None:
        """Return when the topic is ready; raise ``SinkError`` if the preparation fails."""
        with self._lock:
            if topic in self._topics:
                return
        self._prepare_group()
        route = wire.QueryRouteRequest()
        route.topic.name = topic
        self._calls.ask_now("QueryRoute", route)
        with admin(self._calls) as client:  # subscribe now, for daemons with new groups that start at the end
            client.subscribe(GROUP, topic)
        with self._lock:
            self._topics.add(topic)

    def _work(self, topic: str) -> None:
        failure: SinkError | None = None
        try:
            self.prepare_now(topic)
        except SinkError as error:
            failure = error
        except Exception as error:  # callers wait for a result in any case
            log.exception("setup_failed", topic=topic)
            failure = SinkError(f"the topic {topic} could not be prepared: {error}")
        with self._lock:
            waiting = self._waiting.pop(topic)
            self._telling += 1
        for then in waiting:
            then(failure)
        with self._lock:
            self._telling -= 1
            self._lock.notify_all()

    def _prepare_group(self) -> None:
        """Set a policy with the maximum of attempts, so that only the hook gives up; an operator's policy is kept."""
        with self._lock:
            if self._has_group:
                return
        with admin(self._calls) as client:
            try:
                group = client.group(GROUP)
            except NotFound:
                group = None
            if group is None or group.is_default_policy:
                client.set_group(GROUP, policy=_POLICY)
            elif group.policy.max_attempts < MAX_ATTEMPTS_LIMIT:
                log.warning("group_attempts_too_few", group=GROUP, max_attempts=group.policy.max_attempts)
        with self._lock:
            self._has_group = True
