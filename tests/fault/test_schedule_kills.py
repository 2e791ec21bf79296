"""A daemon with schedules every second is killed again and again: occurrences are exactly as each policy says."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from support.daemon import Daemon
from support.effort import EFFORT, SEED

from broker_adapter.clock import SystemClock
from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient
from dmq.embedded.recurring import OCCURRENCE, SCHEDULE
from dmq.upkeep.check import check

TOPIC, PATIENCE_S = "ticks", 60.0
KILLS = min(20, 2 * EFFORT)
BETWEEN_S = (0.2, 3.0)  # at 20 kills a minute in all
pytestmark = pytest.mark.timeout(180 + 30 * KILLS)


def made(admin: AdminClient) -> dict[str, int]:
    """Make one schedule of each policy; return from when each is counted."""
    since = {}
    for policy in ("all", "one", "skip"):
        content = wire.Content(body=b"tick")
        schedule = wire.Schedule(name=policy, topic=TOPIC, interval_ms=1_000, catch_up=policy, content=content)
        since[policy] = admin.add_schedule(schedule).schedule.created_at_ms
    return since


def sent(admin: AdminClient) -> dict[str, list[tuple[int, int]]]:
    """The number and due time of each occurrence in the queues, by schedule."""
    found: dict[str, list[tuple[int, int]]] = {}
    for queue in admin.count(TOPIC).queues:
        at = queue.begin_offset
        while at < queue.end_offset:
            page = admin.peek(TOPIC, queue.queue_id, at, limit=1_000)
            for each in page.messages:
                properties = each.content.properties
                found.setdefault(properties[SCHEDULE], []).append((int(properties[OCCURRENCE]), each.deliver_at_ms))
            at = page.next_offset
    return {name: sorted(each) for name, each in found.items()}


def test_occurrences_are_as_the_policy_says(tmp_path: Path) -> None:
    """All: every second, once. One and skip: numbers without a gap, times of the rule, none twice, and the last one."""
    rng, data = random.Random(SEED), tmp_path / "data"
    with Daemon(data) as daemon:
        with AdminClient(daemon.address) as admin:
            since = made(admin)
        for _ in range(KILLS):
            time.sleep(rng.uniform(*BETWEEN_S))  # a kill at any moment
            daemon.kill()
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
        steps = [(at - since[name]) / 1_000 for _, at in occurrences]
        assert [number for number, _ in occurrences] == list(range(1, len(occurrences) + 1))
        assert steps == sorted(set(steps))
        assert all(step == int(step) for step in steps)
        assert shown[name].occurrences == len(occurrences)
        assert shown[name].last_at_ms == occurrences[-1][1] >= due[name]
    assert len(found["all"]) == (found["all"][-1][1] - since["all"]) // 1_000
    assert not check(data, lambda _: None).findings.count
