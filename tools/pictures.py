"""Take the pictures of docs/reference/console-screens.md: ``make pictures``.

A daemon with the data of a small shop, its console, and the system's Chromium: each screen on a desktop and on a phone,
light and dark. With a folder as argument, whole pages are written there too, as PNG files to look at.
"""

from __future__ import annotations

import base64
import json
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from playwright.sync_api import Browser, Page, expect
from support.clients.wire.client import Received, WireClient, a_message, a_receive, received_of
from support.rigs.daemon.acl import Key, write_acl
from support.rigs.daemon.consoles import MINUTE_MS, console, report_failure
from support.rigs.daemon.process import Daemon
from support.rigs.services.browsers import chromium

from broker_adapter.contracts.message_id import new_message_id
from broker_adapter.wire import rocketmq_v2 as public
from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient

TARGET: Final = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "console"
QUALITY: Final = 38  # of WebP, in percent
DEVICES: Final = {"desktop": (1280, 900), "phone": (390, 844)}
OVERVIEW_S: Final = 75  # until the rates of the overview have a shape
ANNA, SHOP, LEO = Key("anna", "anna-secret"), Key("shop", "shop-secret"), Key("leo", "leo-secret")
KEYS: Final = """
[keys.anna]
secret = "anna-secret"
role = "admin"
[keys.leo]
secret = "leo-secret"
role = "operator"
topics = { "*" = "ADMIN" }
groups = { "*" = "ADMIN" }
[keys.shop]
secret = "shop-secret"
topics = { "*" = "PUB|SUB" }
groups = { "*" = "SUB" }
"""
PATIENT: Final = wire.Policy(table=wire.TableBackoff(steps_ms=[60_000, 300_000, 1_800_000, 7_200_000]), max_attempts=6)


class Failing(NamedTuple):
    """Messages that a group fails ``attempts`` times; ``is_last``: they are dead letters then."""

    topic: str
    group: str
    messages: int
    attempts: int
    is_last: bool
    error: str
    text: str


FAILING: Final = (
    Failing("payments", "billing", 31, 3, True, "GatewayTimeout", "no answer from pay.example within 5 s"),
    Failing("payments", "billing", 12, 3, True, "CardDeclined", "insufficient funds"),
    Failing("payments", "billing", 4, 3, True, "KeyError", "'currency'"),
    Failing("emails", "mailer", 9, 3, True, "SMTPRecipientsRefused", "550 5.1.1 mailbox does not exist"),
    Failing("orders", "fulfilment", 3, 3, True, "OutOfStock", "article 4471 is not in stock"),
    Failing("payments", "billing", 14, 2, False, "GatewayTimeout", "no answer from pay.example within 5 s"),
    Failing("payments", "billing", 5, 1, False, "ConnectionError", "pay.example:443 refused the connection"),
    Failing("emails", "mailer", 6, 1, False, "SMTPServerDisconnected", "connection unexpectedly closed"),
    Failing("orders", "fulfilment", 8, 2, False, "WarehouseError", "503 Service Unavailable"),
)


class Shop:
    """Data of a shop in a daemon."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._random = random.Random(7)
        self._ids = iter(range(1, 10**9))
        self.client = self.connect("checkout-5d9c")

    def connect(self, client_id: str) -> WireClient:
        """Return a client of the applications."""
        return WireClient(self._address, client_id, SHOP.signer())

    def operator(self, key: Key, why: str = "") -> AdminClient:
        """Return the admin client of a person."""
        return AdminClient(self._address, signer=key.signer(), why=why)

    def message(self, topic: str, delay_ms: int = 0, **properties: str) -> public.Message:
        """Return the next message of a topic."""
        number, now_ms = next(self._ids), int(time.time() * 1000)
        order = str(184_000 + number)
        content: dict[str, object] = {
            "order": order,
            "customer": f"c-{self._random.randrange(10_000, 99_999)}",
            "currency": "EUR",
        }
        content |= {"total": round(self._random.uniform(5, 400), 2)}
        sent = a_message(
            topic,
            new_message_id(now_ms, 4711, number.to_bytes(10, "big")),
            json.dumps(content).encode(),
            deliver_at_ms=now_ms + delay_ms if delay_ms else 0,
            tag=self._random.choice(("web", "app", "store")),
            properties={"order-id": order, **properties},
        )
        sent.system_properties.born_host = "checkout-5d9c"
        sent.system_properties.keys.append(f"order-{order}")
        return sent

    def send(self, *messages: public.Message) -> list[str]:
        """Send messages of one topic; return their ids."""
        ids = []
        for at in range(0, len(messages), 30):
            answer = self.client.send(*messages[at : at + 30])
            assert answer.status.code == public.OK, answer
            ids += [each.message_id for each in answer.entries]
        return ids

    def fill(self) -> None:
        """Make topics, groups, schedules, pending messages and failures."""
        with self.operator(ANNA) as admin:
            for topic in ("orders", "payments", "emails", "invoices", "prices"):
                admin.create_topic(topic, queues=4)
            admin.set_topic("orders", index_properties=["order-id"])
            for topic, group in (
                ("orders", "fulfilment"),
                ("orders", "search-index"),
                ("payments", "billing"),
                ("emails", "mailer"),
                ("invoices", "archive"),
            ):
                admin.create_group(group)
                admin.subscribe(group, topic)
            for each in FAILING:
                self._fail(admin, each)
            self._schedules(admin)
        for topic, count, span_ms in (
            ("orders", 420, 50 * MINUTE_MS),
            ("payments", 160, 22 * 60 * MINUTE_MS),
            ("emails", 240, 70 * 60 * MINUTE_MS),
            ("invoices", 90, 26 * 60 * MINUTE_MS),
            ("prices", 40, 30 * MINUTE_MS),
        ):
            delays = [2 * MINUTE_MS + int(span_ms * self._random.betavariate(1.6, 3)) for _ in range(count)]
            self.send(*(self.message(topic, each) for each in delays))
        soon_ms = int(time.time() * 1000) + 1_000
        self.send(*(self.message("invoices", DMQ_NOT_AFTER_MS=str(soon_ms)) for _ in range(5)))
        time.sleep(1.5)  # until they have expired
        assert not self.client.receive("invoices", "archive", wait_s=1)

    def operate(self) -> tuple[int, int]:
        """Change something as each of the operators; return the numbers of two running jobs, of dead letters and of
        pending messages.
        """
        with self.operator(LEO, "the price list is wrong") as leo:
            leo.set_topic("prices", is_paused=True)
        with self.operator(LEO, "the gateway answers again") as leo:
            failed = leo.retries("billing").retries
            leo.run_retries_now("billing", entries=[each.entry for each in failed[:3]])
        with self.operator(ANNA, "test orders of the new checkout") as anna:
            pending = anna.messages(wire.ListMessagesRequest(topic="orders", state=wire.WAITING, limit=4)).messages
            anna.cancel("orders", [each.message_id for each in pending[:2]])
            anna.reschedule("orders", [pending[2].message_id], deliver_at_ms=int(time.time() * 1000) + 45 * MINUTE_MS)
            anna.fire("orders", [pending[3].message_id])
        with self.operator(ANNA, "the summer sale") as anna:
            anna.set_quota("key", "shop", "sends_per_s", 2_000)
            anna.set_topic("payments", max_pending=50_000)
            anna.set_group("mailer", deliver_rate=200)
            anna.start_audit()
        with self.operator(LEO, "the mailbox was created") as leo:
            leo.start_job(wire.REDRIVE, "mailer", wire.DeadFilter(topics=["emails"]))
        with self.operator(LEO, "the gateway answers again") as leo:
            job = leo.start_job(wire.REDRIVE, "billing", wire.DeadFilter(reasons=["EXHAUSTED"]), rate_per_s=0.1)
        with self.operator(ANNA, "the mail server is down until noon") as anna:
            change = wire.StartMessageJobRequest(
                topic="emails", query="tag:web", delay_by_ms=60 * MINUTE_MS, rate_per_s=0.2
            )
            moved = anna.start_message_job(change).job
        return int(job.job_id), int(moved.job_id)

    def _fail(self, admin: AdminClient, failing: Failing) -> None:
        """Send messages, and report a failure of each of their attempts."""
        steps_ms = [20] * (failing.attempts - 1) + [25 * MINUTE_MS]
        max_attempts = failing.attempts if failing.is_last else 6
        policy = wire.Policy(table=wire.TableBackoff(steps_ms=steps_ms), max_attempts=max_attempts)
        admin.set_group(failing.group, policy=policy)
        self.send(*(self.message(failing.topic) for _ in range(failing.messages)))
        left = failing.messages * failing.attempts
        with self.connect(f"{failing.group}-7f4b8") as consumer, ThreadPoolExecutor(16) as pool:

            def fail(delivery: Received) -> None:
                report_failure(consumer, failing.group, delivery, failing.error, failing.text, f"{failing.group}-1")
                consumer.change_invisible(failing.topic, failing.group, delivery, 1_000)

            while left:
                _beat(consumer, failing.group)
                request = a_receive(failing.topic, failing.group, wait_s=2, invisible_s=30)
                request.message_queue.id = -1  # any
                request.auto_renew = True  # as a push consumer, whose failures follow the policy of the group
                received = received_of(consumer.frames("ReceiveMessage", request))
                left -= len(list(pool.map(fail, received)))
        admin.set_group(failing.group, policy=PATIENT)

    def _schedules(self, admin: AdminClient) -> None:
        for name, topic, every_ms, cron, body in (
            ("price-refresh", "prices", 15 * MINUTE_MS, "", b'{"source": "erp"}'),
            ("nightly-invoices", "invoices", 0, "30 2 * * *", b'{"run": "nightly"}'),
            ("weekly-newsletter", "emails", 0, "0 9 * * 2", b'{"template": "newsletter"}'),
            ("stock-check", "orders", 60 * MINUTE_MS, "", b'{"warehouse": "north"}'),
        ):
            content = wire.Content(body=body, tag="schedule")
            zone = "Europe/Berlin" if cron else ""
            rule = wire.Schedule(name=name, topic=topic, interval_ms=every_ms, cron=cron, time_zone=zone)
            rule.content.CopyFrom(content)
            admin.add_schedule(rule)
        admin.pause_schedule("stock-check")

    @contextmanager
    def traffic(self) -> Iterator[None]:
        """Send and consume until the end, at a rate that varies; one group reads too slowly."""
        ended = threading.Event()

        def run() -> None:
            with ExitStack() as stack:
                readers = [
                    (topic, group, stack.enter_context(self.connect(client_id)))
                    for topic, group, client_id in (
                        ("orders", "fulfilment", "fulfilment-66c1f"),
                        ("emails", "mailer", "mailer-7f4b8"),
                        ("orders", "search-index", "search-index-0"),
                    )
                ]
                while not ended.wait(0.2):
                    for topic, group, reader in readers:
                        _beat(reader, group)
                        self.send(*(self.message(topic) for _ in range(self._random.randint(4, 14))))
                        if group == "search-index" and self._random.random() < 0.7:
                            continue
                        if deliveries := reader.receive(topic, group, batch=32, invisible_s=60):
                            reader.ack(topic, group, deliveries)

        thread = threading.Thread(target=run)
        thread.start()
        yield
        ended.set()
        thread.join()


def _beat(client: WireClient, group: str) -> None:
    kind = public.PUSH_CONSUMER
    client.ask("Heartbeat", public.HeartbeatRequest(group=public.Resource(name=group), client_type=kind))


class Pictures:
    """Windows in which a person is signed in, and their pictures."""

    def __init__(self, browser: Browser, url: str, facts: dict[str, str], folder: Path | None) -> None:
        """``facts`` of this machine are replaced. ``folder``: of whole pages."""
        self._url, self._facts, self._folder = url, facts, folder
        self.windows = {
            f"{device}-{scheme}": self._window(browser, DEVICES[device], scheme)
            for device in DEVICES
            for scheme in ("light", "dark")
        }

    def _window(self, browser: Browser, size: tuple[int, int], scheme: Any) -> Page:  # noqa: ANN401 - a literal
        width, height = size
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, locale="en-GB", timezone_id="UTC"
        )
        context.add_init_script(_REPLACE % json.dumps(self._facts))
        page = context.new_page()
        page.goto(f"{self._url}sign-in")
        page.get_by_label("Access key").fill(ANNA.access_key)
        page.get_by_label("Secret").fill(ANNA.secret_key)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url(self._url)
        return page

    def take(self, name: str, path: str) -> None:
        """Take a screen in each window."""
        for window, page in self.windows.items():
            if path:
                page.goto(self._url + path)
            expect(page.locator("[hx-trigger=load]")).to_have_count(
                0, timeout=60_000
            )  # the story of a message is there
            page.wait_for_timeout(400)  # charts are drawn, and the first live part has arrived
            self._write(f"{name}-{window}", page)

    def _write(self, name: str, page: Page) -> None:
        if self._folder is not None:
            page.screenshot(path=self._folder / f"{name}.png", full_page=True)
        session = page.context.new_cdp_session(page)
        taken = session.send("Page.captureScreenshot", {"format": "webp", "quality": QUALITY})
        (TARGET / f"{name}.webp").write_bytes(base64.b64decode(taken["data"]))


_REPLACE: Final = """
const facts = Object.entries(%s)
const replace = node => {
    const texts = document.createTreeWalker(node, NodeFilter.SHOW_TEXT)
    for (let text = node.nodeType === Node.TEXT_NODE ? node : texts.nextNode(); text; text = texts.nextNode())
        for (const [fact, other] of facts)
            if (text.data.includes(fact)) text.data = text.data.replaceAll(fact, other)
}
new MutationObserver(changes => changes.forEach(each => each.addedNodes.forEach(replace)))
    .observe(document, {childList: true, subtree: true})
"""


def screens(shop: Shop, job_id: int, moved_id: int) -> dict[str, str]:
    """Return the path of each screen by the name of its picture."""
    with shop.operator(ANNA) as admin:
        letter = admin.dead_letters("billing", wire.DeadFilter(), limit=1).letters[0]
        failed = admin.retries("fulfilment", limit=1).retries[0]
    return {
        "due": "due?topic=orders",
        "messages": "messages?topic=orders&q=state:waiting",
        "message": f"message?topic=orders&id={failed.message_id}",
        "story": f"story?topic=orders&id={failed.message_id}",
        "change": "bulk-change?topic=emails&q=tag:app&change=move&value=%2B1h",
        "change-job": f"message-job?id={moved_id}",
        "retries": "retries?group=billing",
        "dead-letters": "dead?group=billing",
        "dead-letter": f"letter?group=billing&id={letter.message_id}",
        "redrive": "bulk?group=billing&kind=redrive&error=GatewayTimeout",
        "job": f"job?id={job_id}",
        "topics": "topics",
        "topic": "topic?name=orders",
        "groups": "groups",
        "group": "group?name=billing",
        "schedules": "schedules",
        "schedule": "schedule?name=nightly-invoices",
        "clients": "clients",
        "client": "client?id=shop/mailer-7f4b8",
        "scheduler": "scheduler",
        "store": "store",
        "audit": "audit",
        "activity": "activity",
        "settings": "settings",
        "quotas": "quotas",
    }


def main(folder: Path | None) -> None:
    """Fill a daemon, and take all pictures."""
    with tempfile.TemporaryDirectory() as home_path, chromium() as browser:
        home = Path(home_path)
        for name in ("copy", "backups"):
            (home / name).mkdir()
        env = {
            "DMQ_ACL": str(write_acl(home, KEYS)),
            "DMQ_REPLICA": "async",
            "DMQ_REPLICA_URL": f"file://{home}/copy",
            "DMQ_BACKUP_DIR": str(home / "backups"),
            "DMQ_BACKUP_EVERY": "1m",
        }
        with (
            Daemon(home / "rock-dmq", env={**os.environ, **env}, processes=1) as daemon,
            console(daemon.address) as url,
        ):
            shop = Shop(daemon.address)
            shop.fill()
            facts = {str(home): "/var/lib", daemon.address: "127.0.0.1:8081", socket.gethostname(): "shop-1"}
            pictures = Pictures(browser, url, facts, folder)
            with shop.traffic():
                for page in pictures.windows.values():  # open while the rates arrive
                    page.wait_for_timeout(OVERVIEW_S * 1000 / len(pictures.windows))
                jobs = shop.operate()
                pictures.take("overview", "")
                for name, path in screens(shop, *jobs).items():
                    pictures.take(name, path)
            for page in pictures.windows.values():
                page.context.close()


if __name__ == "__main__":
    TARGET.mkdir(exist_ok=True)
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
