"""The screens of messages, retries and dead letters in a real browser, on a real daemon.

The fixture ``opened`` fails every test whose page broke its policy or asked another server for anything.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from support.clients.wire.client import WireClient, a_message
from support.rigs.daemon.consoles import FAILED_GROUP, FAILED_TOPIC, TOPIC, Open, Site, console, message_id
from support.rigs.daemon.process import Daemon, run_command

from broker_adapter.wire import rocketmq_v2 as public
from broker_adapter.wire.mapping import set_timestamp
from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient

pytestmark = pytest.mark.browser

PATIENCE_MS = 60_000  # of a machine that stalls
BULK = 10_000
BULK_GROUP = "bulk"
DELAYED = 1_200
WAITING = [message_id(1000 + number) for number in range(60)]
FAILED = message_id(2002)  # the other tests leave it alone


def command(site: Site, *words: str) -> Any:  # noqa: ANN401 - JSON
    """Return the output of a command about the daemon of the site."""
    done = run_command(*words, "--address", site.daemon.address, "-o", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_query_finds_the_messages_of_the_command(site: Site, opened: Open) -> None:
    """The page and the equivalent command that it shows list the same; the words are completed while one types."""
    page = opened(f"{site.url}messages?topic={TOPIC}")
    query = page.get_by_label("Query")
    query.press_sequentially("st")
    expect(page.locator("#words option")).to_have_count(1)
    expect(page.locator("#words option")).to_have_attribute("value", "state:")
    query.fill("state:queued tag:created key:order-4701")
    page.get_by_role("button", name="Find").click()
    expect(page.locator("#rows tr")).to_have_count(1)
    shown = page.locator(".command code").inner_text()
    assert shown == "dmq msg ls orders --query 'state:queued tag:created key:order-4701'"
    listed = command(site, "msg", "ls", TOPIC, "--query", "state:queued tag:created key:order-4701")["messages"]
    assert page.locator("#rows .id").all_inner_texts() == [each["message_id"] for each in listed]
    query.fill("state:queued stat:x")
    page.get_by_role("button", name="Find").click()
    expect(page.get_by_role("alert")).to_contain_text("position 14: unknown word 'stat'")
    expect(page.get_by_label("Query")).to_have_value("state:queued stat:x")


def test_each_number_of_the_topics_opens_its_messages(site: Site, opened: Open) -> None:
    """Of queued and pending ones, as many as the number says."""
    page = opened(f"{site.url}topics")
    row = page.locator("tr", has=page.get_by_role("link", name=TOPIC, exact=True))
    count = int(row.locator("td.n a").first.inner_text())
    row.locator("td.n a").first.click()
    expect(page.locator("#rows tr")).to_have_count(count)
    expect(page.get_by_label("Query")).to_have_value("state:queued")


def test_a_stale_button_shows_the_state_of_the_message(site: Site, opened: Open) -> None:
    """A message is rescheduled, then cancelled; a page that still offers to deliver it does nothing, and says why."""
    address = f"{site.url}message?topic={TOPIC}&id={WAITING[7]}"
    page, stale = opened(address), opened(address)
    page.get_by_label("New time").fill("+3h")
    page.get_by_label("Reason").fill("the warehouse is closed")
    page.get_by_role("button", name="Reschedule").click()
    expect(page.get_by_role("status")).to_contain_text("Rescheduled")
    with AdminClient(site.daemon.address) as client:
        (changed,) = [each for each in client.activity().activities if each.rpc == "ChangeMessages"]
        due_at_ms = client.message(TOPIC, WAITING[7]).deliver_at_ms
    assert changed.why == "the warehouse is closed"
    assert due_at_ms > changed.began_at_ms + 2 * 3_600_000
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("status")).to_contain_text("Cancelled")
    stale.get_by_role("button", name="Deliver now").click()
    expect(stale.get_by_role("status")).to_contain_text("Not delivered: it was cancelled")
    expect(stale.locator(".badge").first).to_have_text("recalled")
    expect(stale.get_by_role("button", name="Deliver now")).to_have_count(0)


def test_chosen_messages_are_changed_together(site: Site, opened: Open) -> None:
    """Each has its own outcome: one that was cancelled meanwhile is not rescheduled, and the answer says so."""
    page = opened(f"{site.url}messages?topic={TOPIC}&q=state:waiting+tag:later")
    for each in WAITING[11:14]:
        page.get_by_label(each).check()
    with AdminClient(site.daemon.address) as client:
        client.cancel(TOPIC, [WAITING[11]])
    page.get_by_label("New time").fill("+9h")
    page.get_by_role("button", name="Reschedule").click()
    expect(page.get_by_role("status")).to_have_text("2 rescheduled; 1 had been cancelled.")
    expect(page.get_by_label("Query")).to_have_value("state:waiting tag:later")
    page.goto(f"{site.url}messages?topic={TOPIC}&q=due-after:%2B8h+due-before:%2B10h")
    for each in WAITING[12:14]:
        expect(page.get_by_role("link", name=each)).to_have_count(1)


def test_a_message_is_delivered_now(site: Site, opened: Open) -> None:
    """Its page shows it in its queue."""
    page = opened(f"{site.url}message?topic={TOPIC}&id={WAITING[8]}")
    page.get_by_role("button", name="Deliver now").click()
    expect(page.get_by_role("status")).to_contain_text("Delivered now")
    _reload_until(page, ".badge", "queued")


def test_a_message_has_its_story_before_and_after_the_export(site: Site, opened: Open) -> None:
    """The events are those of the store and of the trail; each failure has its error and its client."""
    page = opened(f"{site.url}message?topic={FAILED_TOPIC}&id={FAILED}")
    events = page.locator("#story tbody tr")
    expect(events).to_have_count(2, timeout=PATIENCE_MS)
    with AdminClient(site.daemon.address) as client:
        client.take_snapshot()  # all events are exported
    page.reload()
    expect(events).to_have_count(2, timeout=PATIENCE_MS)
    expect(page.locator("#story .badge")).to_have_count(0)
    expect(events.first).to_contain_text("queued")
    expect(events.last).to_contain_text("CourierError: no courier <script>")
    expect(events.last).to_contain_text("packer-1, address loopback, host packer-host")
    expect(page.locator("tr", has=page.get_by_text("retrying"))).to_contain_text("2 of 4")
    with AdminClient(site.daemon.address) as client:
        client.fire(TOPIC, [WAITING[9]])
    page.goto(f"{site.url}story?topic={TOPIC}&id={WAITING[9]}")
    _reload_until(page, "#story tbody tr:last-child th", "delivered")
    expect(page.locator("#story tbody th").first).to_have_text("scheduled")


def test_retries_show_their_errors_and_are_moved(site: Site, opened: Open) -> None:
    """One runs now, one becomes a dead letter that is listed by its error, and the numbers are those of the command."""
    page = opened(f"{site.url}retries")
    waiting = len(command(site, "retry", "ls", FAILED_GROUP))
    row = page.locator("tr", has=page.get_by_role("link", name=FAILED_GROUP))
    expect(row.locator("td.n").first).to_have_text(f"{waiting}")
    row.get_by_role("link", name=FAILED_GROUP).click()
    expect(page.locator("#rows tr")).to_have_count(waiting)
    expect(page.locator("#rows tr").first).to_contain_text("CourierError: no courier <script>")
    expect(page.locator("#rows tr").first).to_contain_text("packer-1 on packer-host")
    moved = page.locator("#rows .id").first.inner_text()
    page.get_by_label(moved).check()
    page.get_by_role("button", name="Make dead letters").click()
    expect(page.get_by_role("status")).to_contain_text("1 in the dead-letter queue")
    expect(page.locator("#rows tr")).to_have_count(waiting - 1)
    page.locator("#rows input").first.check()
    page.get_by_role("button", name="Run chosen now").click()
    expect(page.get_by_role("status")).to_contain_text("1 visible to the consumers now")
    page.goto(f"{site.url}dead?group={FAILED_GROUP}")
    page.get_by_role("link", name="CourierError").click()
    expect(page.locator("#rows .id")).to_have_text([moved])
    page.get_by_role("link", name=re.compile("^Purge these")).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Purge 1 dead letter")
    page.get_by_label("Reason").fill("the parcel is lost")
    page.get_by_role("button", name="Purge 1 dead letter").click()
    _until_ended(page)
    expect(page.locator("#rows tr")).to_contain_text(["purged"])
    with AdminClient(site.daemon.address) as client:
        (letter,) = client.dead_letters(FAILED_GROUP, wire.DeadFilter(), with_outcome=True).letters
        assert client.message(FAILED_TOPIC, moved).groups[0].outcome == "purged"
    assert (letter.outcome, letter.outcome_note) == ("purged", "the parcel is lost")


class TestBulk:
    """A daemon of its own, which is killed."""

    @pytest.fixture(scope="class")
    @staticmethod
    def bulk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
        """A site with ``BULK`` dead letters of a group."""
        home: Path = tmp_path_factory.mktemp("bulk")
        with Daemon(home / "data", processes=1) as daemon:
            with AdminClient(daemon.address) as client:
                client.create_group(BULK_GROUP)
                client.create_topic("orders-again", queues=1)
            _send_letters(daemon.address)
            with console(daemon.address) as url:
                yield Site(url, daemon, [])

    def test_a_bulk_redrive_is_paused_and_resumed_after_a_kill(self, bulk: Site, opened: Open) -> None:
        """It is counted and confirmed first; at its end each of the letters has one outcome, and one new message."""
        page = opened(f"{bulk.url}dead?group={BULK_GROUP}")
        page.get_by_role("link", name=re.compile("^Redrive all")).click()
        expect(page.locator(".figure.bad dd").first).to_have_text(f"{BULK:,}")  # they came from no topic
        page.get_by_label("or of topic").fill("orders-again")
        page.get_by_role("button", name="Count again").click()
        expect(page.get_by_role("heading", level=1)).to_have_text(f"Redrive {BULK:,} dead letters")
        expect(page.locator("section").last.locator("tbody tr")).to_have_count(20)
        page.get_by_label("Rate").fill("1250")
        page.get_by_label(re.compile("to confirm")).fill(BULK_GROUP)
        page.get_by_role("button", name=f"Redrive {BULK:,} dead letters").click()
        expect(page.locator("#done")).not_to_have_text("0", timeout=PATIENCE_MS)
        page.get_by_role("button", name="Pause").click()
        expect(page.get_by_role("button", name="Resume")).to_be_visible(timeout=PATIENCE_MS)
        paused = int(page.locator("#done").inner_text().replace(",", ""))
        assert 0 < paused < BULK
        bulk.daemon.kill()
        page.reload()
        expect(page.get_by_role("heading", level=1)).to_have_text("The daemon does not answer")
        bulk.daemon.restart()
        expect(page.locator("#done")).to_have_text(f"{paused:,}", timeout=PATIENCE_MS)
        page.get_by_role("button", name="Resume").click()
        _until_ended(page)
        expect(page.locator("#done")).to_have_text(f"{BULK:,}")
        with AdminClient(bulk.daemon.address) as client:
            letters = _letters(client)
            notes = {each.outcome_note for each in letters}
            assert [each.outcome for each in letters] == ["redriven"] * BULK
            assert (len(notes), client.topic("orders-again").stored) == (BULK, BULK)
        page.goto("about:blank")  # the end of the console would be an error of an open page

    def test_a_bulk_reschedule_moves_each_message_once_across_a_kill(self, bulk: Site, opened: Open) -> None:
        """It is counted and confirmed first, paused, and resumed after the kill; the matches are one hour later."""
        due_ms = _send_delayed(bulk.daemon.address)
        page = opened(f"{bulk.url}messages?topic=later&q=tag:late")
        page.get_by_role("link", name=re.compile("^Change all pending")).click()
        page.get_by_label("Change").select_option("move")
        page.get_by_role("button", name="Count again").click()
        expect(page.get_by_role("heading", level=1)).to_have_text(f"Move: {DELAYED:,} pending messages")
        expect(page.locator("section").last.locator("tbody tr")).to_have_count(20)
        page.get_by_label("Rate").fill("120")  # so that a stalled machine meets the job before its end
        page.get_by_label(re.compile("to confirm")).fill("later")
        page.get_by_role("button", name=f"Move: {DELAYED:,} messages").click()
        expect(page.locator("#done")).not_to_have_text("0", timeout=PATIENCE_MS)
        page.get_by_role("button", name="Pause").click()
        expect(page.get_by_role("button", name="Resume")).to_be_visible(timeout=PATIENCE_MS)
        paused = int(page.locator("#done").inner_text().replace(",", ""))
        assert 0 < paused < DELAYED
        bulk.daemon.kill()
        bulk.daemon.restart()
        expect(page.locator("#done")).to_have_text(f"{paused:,}", timeout=PATIENCE_MS)
        page.get_by_role("button", name="Resume").click()
        _until_ended(page)
        expect(page.locator("#done")).to_have_text(f"{DELAYED:,}")
        expect(page.locator("#rows tr").first).to_contain_text("changed")
        with AdminClient(bulk.daemon.address) as client:
            moved = _due_of(client, "tag:late")
            assert [each - due_ms for each in moved] == [3_600_000] * DELAYED
            assert _due_of(client, "tag:other") == [due_ms]
            (job,) = client.message_jobs("later")
            assert (job.done, job.gone, job.unchanged, job.query) == (DELAYED, 0, 0, "tag:late")
        page.goto("about:blank")


def _send_delayed(address: str) -> int:
    """Send ``DELAYED`` messages that match and one that does not; return their delivery time."""
    due_ms = (time.time_ns() // 1_000_000) + 3_600_000
    with WireClient(address, "later-1") as client:
        for first in range(0, DELAYED, 500):
            numbers = range(first, min(first + 500, DELAYED))
            sent = [_delayed("late", BULK + each, due_ms) for each in numbers]
            assert client.send(*sent, deadline_s=60).status.code == public.OK
        assert client.send(_delayed("other", 2 * BULK, due_ms)).status.code == public.OK
    return due_ms


def _delayed(tag: str, number: int, due_ms: int) -> public.Message:
    message = a_message("later", message_id(number), b"{}")
    message.system_properties.tag = tag
    message.system_properties.message_type = public.DELAY
    set_timestamp(message.system_properties.delivery_timestamp, due_ms)
    return message


def _due_of(client: AdminClient, query: str) -> list[int]:
    request = wire.ListMessagesRequest(topic="later", query=f"state:waiting {query}", limit=1_000)
    found, is_complete = list[int](), False
    while not is_complete:
        page = client.messages(request)
        found += [each.deliver_at_ms for each in page.messages]
        request.token, is_complete = page.next_token, not page.next_token
    return found


def _send_letters(address: str) -> None:
    """Send ``BULK`` messages to the dead-letter queue of a group, as a client may."""
    with WireClient(address, "bulk-1") as client:
        for first in range(0, BULK, 500):
            sent = [a_message(f"%DLQ%{BULK_GROUP}", message_id(first + each), b"{}") for each in range(500)]
            assert client.send(*sent, deadline_s=60).status.code == public.OK


def _letters(client: AdminClient) -> Sequence[wire.DeadLetter]:
    found, offset = list[wire.DeadLetter](), 0
    while offset >= 0:
        page = client.dead_letters(BULK_GROUP, wire.DeadFilter(), offset=offset, with_outcome=True)
        found += page.letters
        offset = page.next_offset
    return found


def _until_ended(page: Page) -> None:
    """Wait for the end of the job of a page, which is live; load its outcomes again."""
    expect(page.locator("#part .badge").first).to_have_text("done", timeout=PATIENCE_MS)
    page.reload()


def _reload_until(page: Page, selector: str, text: str) -> None:
    while text not in page.locator(selector).first.inner_text():
        page.reload()
