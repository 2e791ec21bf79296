"""A daemon with schedules every second is killed again and again: occurrences are exactly as each policy says."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from support.effort import EFFORT, SEED
from support.rigs.daemon.process import Daemon

from broker_adapter.contracts.schedules import OCCURRENCE, SCHEDULE
from broker_adapter.runtime.clock import SystemClock
from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient
from dmq.recovery import check_store

TOPIC, PATIENCE_S = "ticks", 60.0
KILLS = min(20, 2 * EFFORT)
BETWEEN_S, DOWN_S = (0.2, 2.2), (0.0, 1.8)  # at 20 kills a minute in all; times pass while it is down
pytestmark = [pytest.mark.fault, pytest.mark.timeout(180 + 30 * KILLS)]


def made(admin: AdminClient) -> dict[str, int]:
    """Make one schedule of each policy; return from when each is counted."""
    since = {}
    for policy in ("all", "one", "skip"):
        content = wire.Content(body=b"tick")
        schedule = wire.Schedule(name=policy, topic=TOPIC, interval_ms=1_000, catch_up=policy, content=content)
        since[policy] = admin.add_schedule(schedule).schedule.created_at_ms
    return since


class Sent(NamedTuple):
    """An occurrence in a queue. ``sent_at_ms`` is the very time by which it was decided."""

    number: int
    due_ms: int
    sent_at_ms: int


def sent(admin: AdminClient) -> dict[str, list[Sent]]:
    """The occurrences in the queues by number, by schedule."""
    found: dict[str, list[Sent]] = {}
    for queue in admin.count(TOPIC).queues:
        at = queue.begin_offset
        while at < queue.end_offset:
            page = admin.peek(TOPIC, queue.queue_id, at, limit=1_000)
            for each in page.messages:
                properties = each.content.properties
                occurrence = Sent(int(properties[OCCURRENCE]), each.deliver_at_ms, each.stored_at_ms)
                found.setdefault(properties[SCHEDULE], []).append(occurrence)
            at = page.next_offset
    return {name: sorted(each) for name, each in found.items()}


def test_occurrences_follow_the_policy(tmp_path: Path) -> None:
    """All: every second, once. One and skip: the last time of the rule when it was sent, so none is left out but late.

    Numbers have no gap, no time comes twice, none early, and the last one is there. The downtimes are shorter than what
    ``skip`` lets pass, so it sends what ``one`` does.
    """
    rng, data = random.Random(SEED), tmp_path / "data"
    with Daemon(data) as daemon:
        with AdminClient(daemon.address) as admin:
            since = made(admin)
        for _ in range(KILLS):
            time.sleep(rng.uniform(*BETWEEN_S))  # a kill at any moment
            daemon.kill()
            time.sleep(rng.uniform(*DOWN_S))
            daemon.restart()
        until_ms = SystemClock().now_ms()
        with AdminClient(daemon.address) as admin:
            due = {name: since[name] + (until_ms - since[name]) // 1_000 * 1_000 for name in since}
            until_s = time.monotonic() + PATIENCE_S
            while any(admin.schedule(name).last_at_ms < due[name] for name in since):
                assert time.monotonic() < until_s
                time.sleep(0.05)
            for name in since:
                admin.pause_schedule(name)
            found, shown = sent(admin), {each.name: each for each in admin.schedules().schedules}
        daemon.stop()
    for name, occurrences in found.items():
        steps = [(each.due_ms - since[name]) / 1_000 for each in occurrences]
        assert [each.number for each in occurrences] == list(range(1, len(occurrences) + 1))
        assert steps == sorted(set(steps))
        assert all(step == int(step) for step in steps)
        assert shown[name].occurrences == len(occurrences)
        assert shown[name].last_at_ms == occurrences[-1].due_ms >= due[name]
        late_ms = [each.sent_at_ms - each.due_ms for each in occurrences]
        assert min(late_ms) >= 0
        assert name == "all" or max(late_ms) < 1_000
        print(name, len(occurrences), "of", int(steps[-1]), "times; latest", max(late_ms), "ms")
    assert len(found["all"]) == (found["all"][-1].due_ms - since["all"]) // 1_000
    assert not check_store(data, lambda _: None).findings.count
