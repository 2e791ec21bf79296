"""Each alert fires in a state that a test causes on a real daemon, and its runbook has commands that show the cause.

Prometheus evaluates the rules over figures scraped before and after the cause. See
``support.rigs.services.prometheus``.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from support.clients.wire.client import WireClient, a_message, a_receive, received_of
from support.effort import EFFORT
from support.rigs.daemon.process import Daemon, free_port, run_command
from support.rigs.faults.frozen_disk import mounted
from support.rigs.faults.mounts import small_disk
from support.rigs.faults.wall_shim import WallShim
from support.rigs.replica.pair import Pair
from support.rigs.rocketmq.front import front_of
from support.rigs.services.prometheus import (
    RULES,
    Period,
    Scrape,
    assert_alerts,
    promtool,
    rules,
    scrape,
    scrape_until,
)
from support.rigs.services.webhooks import secret_file

from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire import rocketmq_v2 as wire

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]  # bases and backups need processes of their own
ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
MIB = 1024 * 1024
NOW = SystemClock().now_ms


def test_each_alert_has_a_test() -> None:
    """Each name is in an assertion of this module."""
    text = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in rules() if f'"{name}"' not in text] == []


# -- runbooks ----------------------------------------------------------------------------------------------------------


def section(alert: str) -> str:
    """Return the section of the runbook of an alert, with the beginning of its page."""
    page, _, anchor = rules()[alert]["annotations"]["runbook"].partition("#")
    head, *sections = re.split(r"(?m)^## ", (ROOT / page).read_text(encoding="utf-8"))
    for each in sections:
        heading = each.partition("\n")[0]
        if re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") == anchor:
            return f"{head}\n{each}"
    raise AssertionError(f"{alert}: {page} has no section {anchor}")


def test_each_alert_names_a_section_of_a_runbook() -> None:
    """The page exists and has the section, with steps or a table of steps."""
    for alert in rules():
        assert re.search(r"\*\*Steps:\*\*|\| steps \|", section(alert)), alert


def follow(alert: str, command: str, daemon: Daemon, *more: str, code: int = 0, **names: str) -> str:
    """Run a command of the runbook of an alert, with the names in place of its placeholders; return its output."""
    assert f"dmq {command}" in section(alert), f"the runbook of {alert} does not name dmq {command}"
    words = [names.get(word, word) for word in shlex.split(command)]
    done = run_command(*words, *more, env={"DMQ_ADDRESS": daemon.address})
    assert done.returncode == code, done
    return done.stdout


# -- the shape of a test: before, and after the cause ------------------------------------------------------------------


def assert_fires(alert: str, before: Scrape, *after: Scrape, lasts_s: int = 900, adjusted: str = "") -> None:
    """Assert that an alert does not fire before its cause, and fires at the end of the last scrape after it."""
    *between, last = after
    assert_alerts(
        Period({"orders": before}, firing=[]),
        *(Period({"orders": each}, lasts_s) for each in between),
        Period({"orders": last}, lasts_s, [alert]),
        only=[alert],
        every_s=15 if lasts_s < 86400 else 240,
        adjusted={alert: adjusted} if adjusted else None,
    )


def dmq(*words: str, at: Daemon) -> str:
    """Run a command that succeeds, and return its output."""
    done = run_command(*words, "--address", at.address)
    assert done.returncode == 0, done
    return done.stdout


def send(client: WireClient, *messages: wire.Message) -> None:
    """Send messages that are accepted."""
    assert client.send(*messages).status.code == wire.OK


def give_up(client: WireClient, topic: str, group: str) -> None:
    """Receive one message, and make it a dead letter."""
    (found,) = client.receive(topic, group, batch=1, wait_s=10)
    request = wire.ForwardMessageToDeadLetterQueueRequest(
        group=wire.Resource(name=group),
        topic=wire.Resource(name=topic),
        receipt_handle=found.receipt_handle,
        message_id=found.message_id,
        delivery_attempt=1,
        max_delivery_attempts=1,
    )
    assert client.ask("ForwardMessageToDeadLetterQueue", request).status.code == wire.OK


# -- one daemon --------------------------------------------------------------------------------------------------------


class Shop(NamedTuple):
    """A daemon with two fronts, its client, and its clock; backups, trail and a webhook without a receiver."""

    daemon: Daemon
    client: WireClient
    shim: WallShim
    folder: Path

    def scrape(self) -> Scrape:
        """Scrape the daemon."""
        return scrape(self.daemon.metrics_address)

    def scrape_until(self, series: str, least: float) -> Scrape:
        """Scrape the daemon until a series has a value."""
        return scrape_until(self.daemon.metrics_address, series, least)

    def front_pid(self, starts: int) -> int:
        """Return the process id of the first front once its start of this number serves."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            for each in self.daemon.events("front_serving"):
                if (each["front"], each["starts"]) == ("front-0", starts):
                    return int(each["pid"])
            time.sleep(0.05)
        raise AssertionError(self.daemon.log())


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """The daemon of most tests. The alerts of one do not depend on the others."""
    folder = tmp_path_factory.mktemp("alerts")
    shim = WallShim(folder)
    (folder / "backups").mkdir()
    settings = {
        "DMQ_TRAIL": str(folder / "trail"),
        "DMQ_TRAIL_EVERY": "1s",
        "DMQ_BACKUP_EVERY": "1m",
        "DMQ_BACKUP_DIR": str(folder / "backups"),
        "DMQ_ON_DEAD_LETTER": f"http://127.0.0.1:{free_port()}/",
        "DMQ_WEBHOOK_SECRET_FILE": str(secret_file(folder)),
        "DMQ_WEBHOOK_PRIVATE_ADDRESSES": "true",
    }
    env = environment(settings, shim)
    with (
        Daemon(folder / "data", env=env, metrics="127.0.0.1:0", processes=2) as daemon,
        WireClient(daemon.address) as client,
    ):
        yield Shop(daemon, client, shim, folder)


def environment(settings: dict[str, str], shim: WallShim | None = None) -> dict[str, str]:
    """Return the environment of a daemon with these settings."""
    return {**os.environ, **settings, **(shim.environment if shim is not None else {})}


def test_a_healthy_daemon_causes_no_alert(shop: Shop) -> None:
    """Sends, delayed messages, deliveries and acknowledgements; and what it serves is well-formed for Prometheus."""
    shop.client.receive("tea", "readers")
    send(shop.client, a_message("tea", "A0"), a_message("tea", "A1"))
    send(shop.client, a_message("tea", "A2", deliver_at_ms=NOW() + 200))
    assert len(shop.client.drain("tea", "readers", 3)) == 3
    found = shop.scrape_until("dmq_last_backup_timestamp_seconds", 1)
    assert_alerts(Period({"orders": found}, 3600, []))
    checked = promtool("check", "metrics", text=found.text)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    assert promtool("check", "rules", str(RULES)).returncode == 0


def test_messages_without_a_consumer(shop: Shop) -> None:
    """A group with unread messages that no consumer receives."""
    shop.client.receive("jobs", "workers")
    send(shop.client, a_message("jobs", "B0"))
    assert len(shop.client.drain("jobs", "workers", 1)) == 1
    before = shop.scrape()
    send(shop.client, a_message("jobs", "B1"))
    after = shop.scrape_until(of_group("dmq_group_unread_messages", "jobs", "workers"), 1)
    assert_fires("DmqGroupStopped", before, after)
    assert "workers" in follow("DmqGroupStopped", "group ls", shop.daemon)
    assert "workers" not in follow("DmqGroupStopped", "client ls --group GROUP", shop.daemon, GROUP="workers")


def of_group(metric: str, topic: str, group: str) -> str:
    """Return the series of a group in a topic."""
    return f'{metric}{{messaging_consumer_group_name="{group}",messaging_destination_name="{topic}"}}'


def test_failed_messages_before_their_next_attempt(shop: Shop) -> None:
    """Messages that a push consumer fails; a thousand of them in a long run, else a few with a lower threshold."""
    topic, group, count = "bills", "billing", 1_008 if EFFORT > 1 else 16
    dmq("topic", "create", topic, at=shop.daemon)
    dmq("group", "create", group, at=shop.daemon)
    dmq("group", "set-policy", group, "--exponential", "1h..2h", at=shop.daemon)
    shop.client.receive(topic, group)
    before = shop.scrape()
    request = a_receive(topic, group, wait_s=10)
    request.auto_renew, request.message_queue.id = (
        True,
        -1,
    )  # as a push consumer: a change of the invisible duration is a failure
    for number in range(0, count, 16):
        send(shop.client, *(a_message(topic, f"C{each:04}") for each in range(number, number + 16)))
    failed = 0
    while failed < count:
        for each in received_of(shop.client.frames("ReceiveMessage", request, deadline_s=20)):
            assert shop.client.change_invisible(topic, group, each, 3_600_000).status.code == wire.OK
            failed += 1
    after = shop.scrape_until(of_group("dmq_group_in_retry_messages", topic, group), count)
    assert_fires("DmqRetriesPileUp", before, after, adjusted="" if EFFORT > 1 else "10")
    assert f"{count:,}" in follow("DmqRetriesPileUp", "retry stats", shop.daemon)
    assert "bills" in follow("DmqRetriesPileUp", "retry ls GROUP", shop.daemon, GROUP=group)
    follow("DmqRetriesPileUp", "retry to-dead GROUP --topic T", shop.daemon, "--yes", GROUP=group, T=topic)


@pytest.fixture(scope="module")
def dead_letter(shop: Shop) -> tuple[Scrape, Scrape]:
    """Make a message a dead letter; the scrapes are from before and after it."""
    shop.client.receive("coins", "minting")
    send(shop.client, a_message("coins", "D0"))
    before = shop.scrape()
    give_up(shop.client, "coins", "minting")
    return before, shop.scrape()


def test_dead_letters(shop: Shop, dead_letter: tuple[Scrape, Scrape]) -> None:
    """A consumer gives a message up."""
    assert_fires("DmqDeadLetters", *dead_letter, lasts_s=300)
    assert "minting" in follow("DmqDeadLetters", "dead groups", shop.daemon)
    assert "D0" in follow("DmqDeadLetters", "dead ls GROUP --by-error", shop.daemon, GROUP="minting")


def test_messages_past_their_retention(shop: Shop) -> None:
    """Retention removes messages that no group read, and keeps those of a group that does not read."""
    shop.client.receive("held", "sleepers")
    send(shop.client, a_message("held", "E0"))
    dmq("topic", "create", "lost", at=shop.daemon)
    before = shop.scrape()
    send(shop.client, a_message("lost", "E1"))
    for topic in ("held", "lost"):
        dmq("topic", "set", topic, "--keep-time", "1s", at=shop.daemon)
    shop.scrape_until("dmq_messages_expired_total", 1)
    after = shop.scrape_until("dmq_held_queues", 1)
    assert_fires("DmqRemovedUnread", before, after)
    assert_fires("DmqRetentionHeld", before, after, lasts_s=3 * 86400)
    assert "sleepers" in follow("DmqRetentionHeld", "group ls", shop.daemon)


def test_a_trail_that_cannot_be_written(shop: Shop) -> None:
    """A file in place of its directory."""
    trail, before = shop.folder / "trail", shop.scrape()
    trail.rename(shop.folder / "moved")
    trail.touch()
    send(shop.client, a_message("tea", "F0"))
    after = shop.scrape_until("dmq_audit_export_stopped", 1)
    trail.unlink()
    (shop.folder / "moved").rename(trail)
    assert_fires("DmqTrailStopped", before, after)


def test_a_stalled_daemon_is_late(shop: Shop) -> None:
    """The process is stopped while delayed messages become due, twice within minutes."""
    shop.client.receive("slow", "readers")
    found = [shop.scrape()]
    for number in range(2):
        found.append(after_stall(shop, found[-1], f"G{number}"))
    assert_fires("DmqLate", *found, lasts_s=240)


def after_stall(shop: Shop, before: Scrape, name: str) -> Scrape:
    """Stop the daemon while a message becomes due, and scrape it after that; again if the machine stalls itself."""
    for delay_s in (1, 4, 16, 64):
        due_ms = NOW() + delay_s * 1000
        send(shop.client, a_message("slow", f"{name}-{delay_s}", deliver_at_ms=due_ms))
        shop.daemon.signal(signal.SIGSTOP)
        try:
            while NOW() < due_ms + 1_500:
                time.sleep(0.05)
        finally:
            shop.daemon.signal(signal.SIGCONT)
        assert len(shop.client.drain("slow", "readers", 1)) == 1
        found = shop.scrape()
        if late(found) > late(before):
            return found
    raise AssertionError(f"no message of {name} was late")


def late(found: Scrape) -> float:
    """Return the number of messages that were more than a second late."""
    return found.value("dmq_lateness_seconds_count") - found.value('dmq_lateness_seconds_bucket{le="1.0"}')


def test_a_clock_step_and_a_failed_backup(shop: Shop) -> None:
    """The clock is stepped to the time of the next backup, whose folder is gone."""
    backups, before = shop.folder / "backups", shop.scrape_until("dmq_last_backup_timestamp_seconds", 1)
    backups.rename(shop.folder / "away")
    shop.shim.step(70_000)
    after = shop.scrape_until("dmq_clock_steps_total", 1)
    assert_fires("DmqClockStepped", before, after, lasts_s=300)
    assert "stepped" in follow("DmqClockStepped", "clock", shop.daemon)
    shop.daemon.wait_for("backup_failed", timeout_s=PATIENCE_S)
    assert_fires("DmqBackupOld", before, shop.scrape(), lasts_s=3 * 86400)
    assert "FAILED" in dmq("status", at=shop.daemon)


def test_a_webhook_without_a_receiver(shop: Shop, dead_letter: tuple[Scrape, Scrape]) -> None:
    """The notification of the dead letter fails three times: at once, after 5 and after 15 seconds."""
    before, _ = dead_letter
    after = shop.scrape_until('dmq_notifications_failed_total{kind="dead_letter"}', 3)
    assert_fires("DmqNotificationsFail", before, after)
    assert "not delivered" in follow("DmqNotificationsFail", "status", shop.daemon)


def test_a_front_that_ends_repeatedly(shop: Shop) -> None:
    """One end causes no alert, two within minutes do."""
    starts = 'dmq_process_starts_total{process="front-0"}'
    found = [shop.scrape()]
    for number in (1, 2):
        os.kill(shop.front_pid(number), signal.SIGKILL)
        found.append(shop.scrape_until(starts, number + 1))
    before, once, twice = found
    assert_alerts(
        Period({"orders": before}, firing=[]),
        Period({"orders": once}, 300, []),
        Period({"orders": twice}, 300, ["DmqFrontEnded"]),
        only=["DmqFrontEnded"],
    )
    assert "STARTED 3 TIMES" in follow("DmqFrontEnded", "status", shop.daemon)


# -- daemons of their own ----------------------------------------------------------------------------------------------


def test_a_killed_daemon_with_a_torn_log_and_old_messages(tmp_path: Path) -> None:
    """A kill, a log that ends within a record, and a group whose message was stored an hour before the start."""
    shim, topic, group = WallShim(tmp_path), "orders", "billing"
    shim.step(-3_600_000)
    env = environment({"DMQ_CLOCK_JUMP_MAX": "off", "DMQ_TRAIL": "off"}, shim)
    with Daemon(tmp_path / "data", env=env, metrics="127.0.0.1:0") as daemon, WireClient(daemon.address) as client:
        client.receive(topic, group)
        send(client, a_message(topic, "H0"))
        send(client, a_message(topic, "H1"))
        before = scrape(daemon.metrics_address)
        daemon.kill()
        assert_alerts(
            Period({"orders": before}, firing=[]),
            Period({"orders": scrape(daemon.metrics_address)}, firing=["DmqDown"]),
            only=["DmqDown"],
        )
        log = max((daemon.data / "rocksdb").glob("*.log"), key=lambda each: each.name)
        os.truncate(log, log.stat().st_size - 3)
        shim.step(0)
        daemon.restart()
        after = scrape_until(daemon.metrics_address, of_group("dmq_group_oldest_unread_age_seconds", topic, group), 1)
        assert_fires("DmqLogCut", before, after)
        assert_fires("DmqGroupBehind", before, after)
        assert group in follow("DmqGroupBehind", "group ls", daemon)
        assert "torn log cut" in dmq("status", at=daemon)


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """First there is little space, then sends are refused."""
    disk = tmp_path / "disk"
    disk.mkdir()
    prefix = small_disk(disk, 112 * MIB)
    env = environment({"DMQ_TRAIL": "off"})
    with (
        Daemon(disk / "data", env=env, prefix=prefix, metrics="127.0.0.1:0") as daemon,
        WireClient(daemon.address) as client,
    ):
        before = found = scrape(daemon.metrics_address)
        low = before.value("dmq_disk_low_water_bytes")
        number = 0
        while found.value("dmq_disk_free_bytes") > 1.5 * low:
            send(client, a_message("orders", f"I{number}", os.urandom(3 * MIB)))
            number, found = number + 1, scrape(daemon.metrics_address)
        assert_fires("DmqDiskLow", before, found)
        assert "sends refused below" in dmq("status", at=daemon)
        refused: list[Scrape] = []
        while len(refused) < 3:
            answer = client.send(a_message("orders", f"I{number}", os.urandom(3 * MIB)))
            number += 1
            if answer.status.code != wire.OK:
                assert answer.status.code == wire.TOO_MANY_REQUESTS, answer
                refused.append(scrape(daemon.metrics_address))
        assert_fires("DmqSendsRefused", found, *refused, lasts_s=240)
        assert "disk" in follow("DmqSendsRefused", "status", daemon)


def test_a_stalled_disk(tmp_path: Path) -> None:
    """A file system that is frozen during a send."""
    with mounted(tmp_path) as disk, Daemon(disk.path / "data", metrics="127.0.0.1:0") as daemon:
        before = scrape(daemon.metrics_address)
        with WireClient(daemon.address) as client, disk.frozen(PATIENCE_S):
            with pytest.raises(grpc.RpcError):
                client.send(a_message("orders", "J0"), deadline_s=1)
            after = scrape_until(daemon.metrics_address, "dmq_disk_stalled_seconds", 3)
        assert_fires("DmqDiskStalled", before, after, lasts_s=60)


def test_a_cluster_that_refuses_and_is_away(tmp_path: Path) -> None:
    """A second daemon stands for the cluster: its topic accepts message groups only, and then it is killed."""
    refused = "dmq_messages_forward_refused_total"
    with (
        Daemon(tmp_path / "cluster") as cluster,
        front_of(cluster, tmp_path / "data", metrics="127.0.0.1:0") as front,
        WireClient(front.address) as client,
    ):
        send(client, a_message("bills", "K0", deliver_at_ms=NOW() + 1))
        scrape_until(front.metrics_address, "dmq_messages_forwarded_total", 1)
        unread = of_group("dmq_group_unread_messages", "bills", "dmq-forwarder")
        before = scrape_until(front.metrics_address, unread, 0, 0)
        assert_alerts(Period({"orders": before}, 3600, []))
        dmq("topic", "set", "bills", "--type", "fifo", at=cluster)
        send(client, a_message("bills", "K1", deliver_at_ms=NOW() + 1))
        found = scrape_until(front.metrics_address, refused, 1)
        assert_fires("DmqForwardRefused", before, found, lasts_s=300)
        assert "K1" in follow("DmqForwardRefused", "dead ls dmq-forwarder", front)
        cluster.kill()
        found = scrape_until(front.metrics_address, "dmq_cluster_away", 1)
        assert_fires("DmqClusterAway", before, found)
        assert "AWAY since" in follow("DmqClusterAway", "status", front)


def test_a_second_copy_that_is_unreachable(tmp_path: Path) -> None:
    """The directory of the copy is moved away: nothing is written or verified, and due messages are not delivered."""
    shim, copy = WallShim(tmp_path), tmp_path / "copy"
    copy.mkdir()
    settings = {"DMQ_REPLICA": "sync", "DMQ_REPLICA_URL": copy.as_uri(), "DMQ_REPLICA_BASE_EVERY": "1m"}
    with (
        Daemon(tmp_path / "data", env=environment(settings, shim), metrics="127.0.0.1:0") as daemon,
        WireClient(daemon.address) as client,
    ):
        dmq("topic", "create", "paused", at=daemon)
        dmq("topic", "pause", "paused", at=daemon)
        send(client, a_message("paused", "L0", deliver_at_ms=NOW() + 10_000))
        scrape_until(daemon.metrics_address, "dmq_held_messages", 1)
        shim.step(65_000)  # to the time of the first base
        before = scrape_until(daemon.metrics_address, "dmq_replica_last_verified_timestamp_seconds", 1)
        assert_alerts(Period({"orders": before}, 3600, []))
        send(client, a_message("orders", "L1", deliver_at_ms=NOW() + 120_000))
        copy.rename(tmp_path / "away")
        shim.step(190_000)
        after = scrape_until(daemon.metrics_address, "dmq_overdue_messages", 2)
        assert after.value("dmq_held_messages") == 1
        after = scrape_until(daemon.metrics_address, "dmq_replica_unreachable", 1)
        after = scrape_until(daemon.metrics_address, "dmq_replica_lag_seconds", 2)
        assert_fires("DmqReplicaUnreachable", before, after)
        assert_fires("DmqMessagesOverdue", before, after)
        assert_fires("DmqReplicaLag", before, after, adjusted="" if EFFORT > 1 else "1")
        assert_fires("DmqReplicaUnverified", before, after, lasts_s=3 * 86400)
        assert "BEHIND by" in follow("DmqReplicaLag", "replica status", daemon, code=6)


def test_a_pair_without_a_primary(tmp_path: Path) -> None:
    """A healthy standby causes no alert. If the copy is lost, the primary ends and the standby cannot take over."""
    pair = Pair(tmp_path, metrics="127.0.0.1:0")
    with closing(pair):
        at = {
            "primary": pair.primary.metrics_address,
            "standby": str(pair.standby.event("standby_listening")["metrics"]),
        }
        before = {name: scrape(address) for name, address in at.items()}
        (tmp_path / "copy").rename(tmp_path / "away")
        assert pair.primary.wait(PATIENCE_S) == 8
        pair.standby.wait_for("standby_waiting", timeout_s=PATIENCE_S)
        after = {name: scrape(address) for name, address in at.items()}
        assert_alerts(
            Period(before, 3600, []), Period(after, firing=["DmqDown", "DmqNoPrimary", "DmqReplicaUnreachable"])
        )
