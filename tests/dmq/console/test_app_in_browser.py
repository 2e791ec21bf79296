"""The console in a real browser, on a real daemon.

The fixture ``opened`` fails every test whose page broke its policy or asked another server for anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect
from support.effort import at_length, drawn
from support.rigs.daemon.acl import OPERATOR, READER, write_acl
from support.rigs.daemon.consoles import GROUP, TOPIC, Open, Site, console, fill, message_id
from support.rigs.daemon.process import Daemon

from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient

pytestmark = pytest.mark.browser

PATIENCE_MS = 30_000  # of a machine that stalls
FIRST_LOAD_BYTES_MAX = 150_000
SCREENS = (
    *("", "due", "messages?topic=orders", "messages?topic=orders&q=state:lost", "retries", "retries?group=shipping"),
    *("dead", "dead?group=billing", "bulk?group=billing&kind=redrive", "bulk?group=billing&kind=purge"),
    *("bulk-change?topic=orders&q=state:waiting&change=move", "bulk-change?topic=orders&q=tag:none"),
    *("topics", "topic?name=orders", "groups", "group?name=shipping"),
)
"""Addresses of the screens without the id of a message."""


def test_the_figures_are_those_of_the_command(site: Site, opened: Open) -> None:
    """The overview shows the daemon's counts, and a message sent meanwhile arrives without a reload."""
    page = opened(site.url)
    with AdminClient(site.daemon.address) as client:
        pending, dead = client.status().timeline.pending, sum(group.dead for group in client.groups())
    expect(page.get_by_role("heading", level=1)).to_have_text("Serving")
    expect(_figure(page, "Pending")).to_have_text(f"{pending}", timeout=PATIENCE_MS)
    expect(_figure(page, "Dead letters")).to_have_text(f"{dead}", timeout=PATIENCE_MS)
    expect(page.locator("#chart canvas")).to_be_visible(timeout=PATIENCE_MS)
    fill(site.daemon.address, dead=0, delayed=61)  # 60 of them have ids that are stored already
    expect(_figure(page, "Pending")).to_have_text(f"{pending + 1}", timeout=PATIENCE_MS)


def test_the_histogram_has_the_counts_of_the_daemon(site: Site, opened: Open) -> None:
    """Its table adds up to all pending messages, and a bar opens those that are due in it."""
    page = opened(f"{site.url}due?topic={TOPIC}")
    page.get_by_text("As a table").click()
    counts = [int(text) for text in page.locator("details td.n").all_inner_texts()]
    with AdminClient(site.daemon.address) as client:
        assert sum(counts) == client.topic(TOPIC).pending
    page.locator(".ahead a").last.dispatch_event("click")
    expect(page).to_have_url(re.compile("due-after"))
    expect(page.locator("#rows tr")).to_have_count(counts[-2])


def test_pages_of_messages_follow_each_other(site: Site, opened: Open) -> None:
    """Each message is listed once, in the order of the command; also without the script."""
    ids, request = list[str](), wire.ListMessagesRequest(topic=TOPIC, limit=1000)
    with AdminClient(site.daemon.address) as client:
        while not ids or request.token:
            found = client.messages(request)
            ids += [each.message_id for each in found.messages]
            request.token = found.next_token
    page = opened(f"{site.url}messages?topic={TOPIC}")
    assert page.locator("#rows td a[href^='/message?']").all_inner_texts() == ids[:50]
    page.get_by_role("link", name="Show more").click()
    expect(page.get_by_role("link", name="Show more")).to_have_count(0)
    assert page.locator("#rows td a[href^='/message?']").all_inner_texts() == ids
    plain = opened(f"{site.url}messages?topic={TOPIC}", java_script_enabled=False)
    plain.get_by_role("link", name="Show more").click()
    assert plain.locator("#rows td a[href^='/message?']").all_inner_texts() == ids[50:]


def test_a_body_is_shown_as_json_text_and_hex(site: Site, opened: Open) -> None:
    """Markup in it is text; a body that is no text is shown as hex."""
    page = opened(f"{site.url}message?topic={TOPIC}&id={site.dead[0]}")
    body = page.locator("#body pre")
    expect(body).to_contain_text('<script>alert(\\"1\\")</script>')
    page.get_by_role("link", name="hex").click()
    expect(body).to_contain_text("00000000  7b 22")
    page.get_by_role("link", name="text").click()
    expect(body).to_contain_text('{"order": 47')
    page.goto(f"{site.url}message?topic={TOPIC}&id={message_id(1000)}&body=json")
    expect(body).to_have_text(
        "00000000  00 ff 62 69 6e 61 72 79                          ..binary", use_inner_text=True
    )


def test_a_dead_letter_is_redriven_once(site: Site, opened: Open) -> None:
    """The page shows the result; a second page that still has the button shows what happened meanwhile."""
    address = f"{site.url}letter?group={GROUP}&id={site.dead[1]}"
    page, stale = opened(address), opened(address)
    page.get_by_label("Reason").fill("the price list is fixed")
    page.get_by_role("button", name="Redrive").click()
    _reload_until(page, "Redriven (job")
    stale.get_by_role("button", name="Redrive").click()
    _reload_until(stale, "Nothing was redriven")
    expect(stale.get_by_role("button", name="Redrive")).to_have_count(0)
    with AdminClient(site.daemon.address) as client:
        (letter,) = client.dead_letters(GROUP, wire.DeadFilter(message_ids=[site.dead[1]]), with_outcome=True).letters
        reasons = [each.why for each in client.activity().activities if each.rpc == "StartJob"]
    assert letter.outcome == "redriven"
    assert sorted(reasons) == ["redriven in the console", "the price list is fixed"]


def test_keys_open_a_row(site: Site, opened: Open) -> None:
    """``j`` and ``k`` move, Enter opens, ``/`` goes to the first field, ``?`` lists the keys."""
    page = opened(f"{site.url}messages?topic={TOPIC}")
    second = page.locator("#rows tr").nth(1).locator("a").inner_text()
    for key in ("j", "j", "j", "k"):
        page.keyboard.press(key)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text(second)
    page.keyboard.press("3")
    expect(page).to_have_url(f"{site.url}messages")
    page.keyboard.press("/")
    expect(page.get_by_label("Topic")).to_be_focused()
    page.get_by_label("Topic").blur()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()


@pytest.mark.parametrize(("width", "scheme"), [pytest.param(390, "light", marks=at_length), (1280, "dark")])
def test_screens_fit_the_window_and_have_no_barrier(site: Site, opened: Open, width: int, scheme: str) -> None:
    """On a phone and on a desktop: no wider than the window, a first heading, the command, no finding of axe."""
    page, axe = opened(site.url, width, color_scheme=scheme), Axe()
    pending = message_id(1005)
    of_one = (f"message?topic={TOPIC}&id={pending}", f"story?topic={TOPIC}&id={pending}")
    letter = (f"message?topic={TOPIC}&id={site.dead[0]}", f"letter?group={GROUP}&id={site.dead[0]}")
    with AdminClient(site.daemon.address) as client:
        started = client.start_message_job(wire.StartMessageJobRequest(topic=TOPIC, query="tag:none", cancel=True))
    job = f"message-job?id={started.job.job_id}"
    screens = [*SCREENS, *of_one, *letter, job]
    examined = drawn(screens, 7)  # by axe, which takes seconds for each
    for screen in screens:
        page.goto(site.url + screen)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), screen
        expect(page.get_by_role("heading", level=1)).to_have_count(1)
        expect(page.locator(".command code")).to_have_text(re.compile("^dmq "))
        if screen in examined:
            found = axe.run(page)
            assert found.violations_count == 0, (screen, found.generate_report())


def test_lists_have_no_hidden_and_no_empty_column(site: Site, opened: Open) -> None:
    """On a desktop the errors of failed messages need no scrolling; pending messages have no queue."""
    page = opened(f"{site.url}messages?topic={TOPIC}&q=state:waiting")
    assert "Queue" not in page.locator("thead th").all_inner_texts()
    page.goto(f"{site.url}messages?topic={TOPIC}")
    assert "Queue" in page.locator("thead th").all_inner_texts()
    for screen in ("retries?group=shipping", "dead?group=billing", "bulk?group=billing&kind=redrive"):
        page.goto(site.url + screen)
        hidden = page.locator(".scroll").evaluate_all("all => all.map(each => each.scrollWidth - each.clientWidth)")
        assert max(hidden) <= 0, screen


def test_the_first_load_is_small(site: Site) -> None:
    """The overview with all its scripts and styles, as compressed bytes."""

    def load(address: str) -> bytes:
        with urlopen(Request(site.url + address, headers={"Accept-Encoding": "gzip"})) as answer:
            body: bytes = answer.read()
        return body

    page = load("")
    parts = re.findall(r'(?:src|href)="/(static/[^"#]+)"', page.decode())
    assert len(parts) >= 5
    assert len(page) + sum(len(load(each)) for each in parts) <= FIRST_LOAD_BYTES_MAX


def test_a_page_outlives_its_daemon(tmp_path: Path, opened: Open) -> None:
    """After a kill the live pages say so and keep their figures; after the restart they are live again."""
    with Daemon(tmp_path / "data", processes=1) as daemon, console(daemon.address) as url:
        page, third = opened(url), opened(f"{url}scheduler")
        expect(page.locator("#chart canvas")).to_be_visible(timeout=PATIENCE_MS)
        daemon.kill()
        for each in (page, third):
            expect(each.locator("#lost")).to_contain_text("no daemon answers", timeout=PATIENCE_MS)
            expect(each.locator(".figure").first).to_be_visible()
        other = opened(f"{url}topics")
        expect(other.get_by_role("heading", level=1)).to_have_text("The daemon does not answer")
        daemon.restart()
        for each in (page, third):
            expect(each.locator("#lost")).to_be_hidden(timeout=PATIENCE_MS)
        expect(other.get_by_role("heading", level=1)).to_have_text("Topics", timeout=PATIENCE_MS)
        for each in (page, third):
            each.goto("about:blank")  # the end of the console would be an error of an open page


class TestSignIn:
    """A daemon with access keys."""

    @pytest.fixture(scope="class")
    @staticmethod
    def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
        """The URL of its console, and its dead letters."""
        home = tmp_path_factory.mktemp("keyed")
        with Daemon(home / "data", "--acl", str(write_acl(home)), processes=1) as daemon:
            dead = fill(daemon.address, OPERATOR.signer(), delayed=0)
            with console(daemon.address) as url:
                yield url, dead

    def test_each_person_has_the_rights_of_the_own_key(self, keyed: tuple[str, list[str]], opened: Open) -> None:
        """A wrong secret is refused; a key without the right sees the refusal; the cookie is out of reach."""
        url, dead = keyed
        page = opened(f"{url}letter?group={GROUP}&id={dead[0]}")
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        _sign_in(page, OPERATOR.access_key, "wrong")
        expect(page.get_by_role("alert")).to_be_visible(timeout=PATIENCE_MS)
        _sign_in(page, OPERATOR.access_key, OPERATOR.secret_key)
        expect(page.get_by_role("heading", level=1)).to_have_text(dead[0])
        (cookie,) = page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        page.get_by_role("button", name="Redrive").click()
        _reload_until(page, "Redriven (job")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        _sign_in(page, READER.access_key, READER.secret_key)
        expect(page.get_by_role("heading", level=1)).to_have_text("Not allowed")
        page.goto(f"{url}topics")
        expect(page.get_by_role("link", name=TOPIC, exact=True)).to_be_visible()


def _figure(page: Page, name: str) -> Any:  # noqa: ANN401 - playwright's locator
    return page.locator(".figure", has=page.get_by_text(name, exact=True)).locator("dd").first


def _reload_until(page: Page, text: str) -> None:
    """Look at the page of a letter again until its job has ended."""
    status = page.get_by_role("status")
    expect(status).to_be_visible()
    while "running" in status.inner_text():
        page.reload()
    expect(status).to_contain_text(text)


def _sign_in(page: Page, access_key: str, secret: str) -> None:
    page.get_by_label("Access key").fill(access_key)
    page.get_by_label("Secret").fill(secret)
    page.get_by_role("button", name="Sign in").click()
