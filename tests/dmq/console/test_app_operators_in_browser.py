"""Screens of schedules, clients, the parts of the daemon and its operators, in a real browser on a real daemon.

The daemon has access keys. The fixture ``opened`` fails every test whose page broke its policy.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect
from support.clients.wire.client import WireClient
from support.effort import at_length, drawn
from support.rigs.broker.audits import await_process, hasten_verification
from support.rigs.daemon.acl import Key, write_acl
from support.rigs.daemon.consoles import Open, console, fill, message_id
from support.rigs.daemon.process import Daemon, run_command

from broker_adapter.wire import rocketmq_v2 as public
from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient

pytestmark = pytest.mark.browser

PATIENCE_MS = 30_000  # of a machine that stalls
BOSS, ON_CALL, VIEWER = Key("boss", "boss-secret"), Key("on-call", "on-call-secret"), Key("viewer", "viewer-secret")
KEYS: Final = """
[keys.boss]
secret = "boss-secret"
role = "admin"
[keys.on-call]
secret = "on-call-secret"
role = "operator"
topics = { "orders*" = "ADMIN" }
[keys.viewer]
secret = "viewer-secret"
role = "viewer"
"""
SCREENS: Final = ("schedules", "schedule?name=hourly", "clients", "scheduler", "store", "audit", "activity", "settings")
PAGES: Final = (
    ("schedule?name=hourly", "Pause"),
    ("quotas", "Set"),
    ("audit", "Verify now"),
    ("audit", "Run an audit"),
)
HOSTILE: Final = "<img src=x onerror=alert(1)>"


class Keyed(NamedTuple):
    """A console, and its daemon with access keys."""

    url: str
    daemon: Daemon

    def client(self, why: str = "") -> AdminClient:
        """Return a client of the daemon."""
        return AdminClient(self.daemon.address, signer=BOSS.signer(), why=why)

    def command(self, *arguments: str) -> Any:  # noqa: ANN401 - JSON
        """Return the answer of a command, as JSON."""
        options = ("--address", self.daemon.address, "--access-key", BOSS.access_key, "-o", "json")
        done = run_command(*options, *arguments, env={"DMQ_SECRET_KEY": BOSS.secret_key})
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    """A daemon with messages, schedules, a quota and records of its operators."""
    home = tmp_path_factory.mktemp("keyed")
    env = {**os.environ, "DMQ_ACL": str(write_acl(home, KEYS)), "DMQ_REDACT": "orders:note"}
    with Daemon(home / "data", env=env, processes=1) as daemon:
        fill(daemon.address, BOSS.signer(), dead=1, delayed=7)
        with console(daemon.address) as url:
            found = Keyed(url, daemon)
            with found.client(HOSTILE) as client:
                client.create_topic("prices")
                for name, topic in (("hourly", "orders"), ("other", "prices")):
                    client.add_schedule(a_schedule(name, topic))
                client.set_quota("key", "shop", "sends_per_s", 500)
            yield found


def a_schedule(name: str, topic: str) -> wire.Schedule:
    """Return a schedule that sends nothing during the tests."""
    return wire.Schedule(name=name, topic=topic, interval_ms=3_600_000, content=wire.Content(body=HOSTILE.encode()))


def signed_in(opened: Open, keyed: Keyed, key: Key, path: str = "", **options: Any) -> Page:  # noqa: ANN401 - playwright's
    """Open a page as the person with a key."""
    page = opened(f"{keyed.url}sign-in?next=/{path.replace('?', '%3F').replace('&', '%26')}", **options)
    page.get_by_label("Access key").fill(key.access_key)
    page.get_by_label("Secret").fill(key.secret_key)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", level=1)).not_to_have_text("Sign in", timeout=PATIENCE_MS)
    return page


def test_the_figures_are_those_of_the_commands(keyed: Keyed, opened: Open) -> None:
    """Each screen shows the rows and numbers of its command."""
    page = signed_in(opened, keyed, BOSS, "scheduler")
    status = keyed.command("status")
    assert figure(page, "Pending").inner_text() == str(status["timeline"]["pending"])
    page.goto(f"{keyed.url}store")
    expect(page.get_by_text(status["data"], exact=True)).to_be_visible()
    page.goto(f"{keyed.url}audit")
    expect(page.get_by_text(status["outbox"]["trail"], exact=True)).to_be_visible()
    expect(figure(page, "Events lost")).to_have_text("0")
    page.goto(f"{keyed.url}schedules")
    listed = keyed.command("cron", "ls")["schedules"]
    assert names_in(page) == [each["name"] for each in listed] == ["hourly", "other"]
    page.goto(f"{keyed.url}activity?key=boss")
    recorded = keyed.command("activity", "ls", "--key", "boss", "-n", "50")
    shown = page.locator("#part tbody td:first-child").all_inner_texts()
    assert shown == [str(each["number"]) for each in recorded][: len(shown)]
    expect(page.get_by_text(HOSTILE).first).to_be_visible()
    page.goto(f"{keyed.url}quotas")
    row = page.locator("tr", has_text="sends_per_s")
    assert row.locator("td").all_inner_texts()[2:4] == ["0", "500"]


def test_a_setting_has_its_value_and_source(keyed: Keyed, opened: Open) -> None:
    """Of the command line, of the environment, and the default; as the command shows them."""
    page = signed_in(opened, keyed, BOSS, "settings?all=1")
    found = {cells[0]: cells[1:] for cells in (row.inner_text().split("\t") for row in page.locator("tbody tr").all())}
    assert found["data"] == [str(keyed.daemon.data), "--data"]
    assert found["acl"] == [str(keyed.daemon.data.parent / "acl.toml"), "DMQ_ACL"]
    assert found["durability"] == ["disk", "default"]
    assert found.keys() == keyed.command("config", "show").keys()


def test_a_client_is_listed_while_it_is_connected(keyed: Keyed, opened: Open) -> None:
    """The open page shows it without a reload; its own page has its group."""
    page = signed_in(opened, keyed, VIEWER, "clients")
    with WireClient(keyed.daemon.address, "worker-7", BOSS.signer()) as client:
        beat = public.HeartbeatRequest(group=public.Resource(name="billing"), client_type=public.SIMPLE_CONSUMER)
        client.ask("Heartbeat", beat)
        expect(page.get_by_role("link", name="worker-7")).to_be_visible(timeout=PATIENCE_MS)
    page.get_by_role("link", name="worker-7").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("boss/worker-7")
    page.goto(f"{keyed.url}client?id=nobody")
    expect(page.get_by_role("alert")).to_contain_text("has not been active")


def test_a_schedule_is_added_paused_resumed_and_removed(keyed: Keyed, opened: Open) -> None:
    """Another open page shows each step; the activity log has the person, and the reason if one was given."""
    other = signed_in(opened, keyed, VIEWER, "schedules")
    page = signed_in(opened, keyed, ON_CALL, "schedules")
    page.get_by_text("Add a schedule").click()
    form = page.locator("form[action='/schedules/add']")
    texts = {"Name": "nightly", "Topic": "orders", "cron": "0 3 * * *", "Body": "clean", "Reason": "cleaning up"}
    for label, value in texts.items():
        form.get_by_label(label).fill(value)
    form.get_by_role("button", name="Add").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("nightly", timeout=PATIENCE_MS)
    row = other.locator("tr", has=other.get_by_role("link", name="nightly"))
    expect(row).to_contain_text("active", timeout=PATIENCE_MS)
    page.get_by_role("button", name="Pause").click()
    expect(row).to_contain_text("paused", timeout=PATIENCE_MS)
    page.get_by_role("button", name="Resume").click()
    expect(row).to_contain_text("active", timeout=PATIENCE_MS)
    page.get_by_text("Remove", exact=True).click()
    page.get_by_role("button", name="Remove nightly").click()
    expect(row).to_have_count(0, timeout=PATIENCE_MS)
    with keyed.client() as client:
        found = [(each.rpc, each.why) for each in client.activity(key="on-call").activities]
    assert found[:4] == [
        ("RemoveSchedule", "removed in the console"),
        ("ResumeSchedule", "resumed in the console"),
        ("PauseSchedule", "paused in the console"),
        ("AddSchedule", "cleaning up"),
    ]


def test_wrong_fields_are_explained(keyed: Keyed, opened: Open) -> None:
    """With the value and the allowed ones; nothing is changed."""
    page = signed_in(opened, keyed, BOSS, "schedules")
    page.get_by_text("Add a schedule").click()
    form = page.locator("form[action='/schedules/add']")
    for label, value in {"Name": "wrong", "Topic": "orders", "Interval": "often", "Body": "clean"}.items():
        form.get_by_label(label).fill(value)
    form.get_by_role("button", name="Add").click()
    expect(page.get_by_role("alert")).to_contain_text("interval 'often'")
    page.goto(f"{keyed.url}activity?since=soon")
    expect(page.get_by_role("alert")).to_contain_text("since='soon'")
    with keyed.client() as client:
        assert [each.name for each in client.schedules().schedules] == ["hourly", "other"]


def test_a_quota_is_set_and_the_ledger_verified(keyed: Keyed, opened: Open) -> None:
    """A link of the list fills in the form; the page of the verification shows its end by itself."""
    page = signed_in(opened, keyed, BOSS, "quotas")
    page.locator("tr", has_text="sends_per_s").get_by_role("link", name="changed").click()
    form = page.locator("form[action='/quotas/set']")
    expect(form.get_by_label("Name")).to_have_value("shop")
    form.get_by_label("Limit").fill("250")
    form.get_by_role("button", name="Set").click()
    expect(page.locator("tr", has_text="sends_per_s")).to_contain_text("250", timeout=PATIENCE_MS)
    page.goto(f"{keyed.url}audit")
    page.get_by_role("button", name="Verify now").click()
    expect(page.get_by_text("Verification of the ledger")).to_be_visible(timeout=PATIENCE_MS)
    number = int(page.url.rpartition("=")[2])
    with keyed.client() as client:
        hasten_verification(client, number, keyed.daemon.data)
    expect(page.get_by_text("balanced")).to_be_visible(timeout=PATIENCE_MS)


def test_the_newest_report_is_shown(keyed: Keyed, opened: Open) -> None:
    """Verdict, hours, findings with links to their messages, and gaps, also of a report that was made elsewhere; no
    text of it becomes markup. Its page runs no script and has an origin of its own.
    """
    folder = write_report(keyed.daemon.data / "audits" / "nightly")
    page = signed_in(opened, keyed, VIEWER, "audit")
    expect(page.get_by_role("heading", level=1)).to_have_text("Messages are lost")
    expect(page.locator(".heat > rect")).to_have_count(48)
    expect(page.locator(".heat .letter")).to_have_text(["L", "t"])
    page.get_by_text("As a table").click()
    expect(page.locator("tr", has_text="2026-11-22 01:00").locator("td").nth(1)).to_have_text("500")
    finding = page.get_by_role("link", name=message_id(0))
    expect(page.locator("tr", has=finding)).to_contain_text(HOSTILE)
    gap = page.locator("tr", has_text="file missing")
    expect(gap.locator("time")).to_have_text(["2026-11-21T00:00:00.000Z", "2026-11-21T01:00:00.000Z"])
    finding.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(message_id(0))
    page.goto(f"{keyed.url}audit")
    answer = page.request.get(f"{keyed.url}audit/report")
    policy = answer.headers["content-security-policy"]
    assert (policy.split(";")[0], "script" in policy, "allow" in policy) == ("sandbox", False, False)
    report = page.context.new_page()
    with report.expect_event("console", lambda said: "Blocked script execution" in said.text):
        report.goto(f"{keyed.url}audit/report")
    expect(report.get_by_text("untouched")).to_be_visible()
    (folder / "summary.json").write_text("{")
    page.goto(f"{keyed.url}audit")
    expect(page.get_by_role("alert")).to_contain_text("summary.json is damaged")
    (folder / "summary.json").unlink()


def test_an_audit_is_started_by_an_operator(keyed: Keyed, opened: Open) -> None:
    """The open page shows its end by itself; the activity log has the person and the reason."""
    page = signed_in(opened, keyed, ON_CALL, "audit")
    form = page.locator("form[action='/audit/run']")
    form.get_by_label("Reason").fill("before the release")
    form.get_by_role("button", name="Run an audit").click()
    expect(page.get_by_text("Last audit started here")).to_be_visible(timeout=PATIENCE_MS)
    with keyed.client() as client:
        await_process(client)
    expect(page.get_by_role("link", name="Show its report")).to_be_visible(timeout=4 * PATIENCE_MS)
    page.get_by_role("link", name="Show its report").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("No message is missing")
    with keyed.client() as client:
        (newest,) = client.activity(key="on-call", limit=1).activities
        assert (newest.rpc, newest.why) == ("StartAudit", "before the release")


def test_a_masked_value_is_shown_to_an_admin_on_request(keyed: Keyed, opened: Open) -> None:
    """The page names the rule; the unmasked reading is recorded."""
    page = signed_in(opened, keyed, BOSS, f"message?topic=orders&id={message_id(0)}")
    expect(page.locator("#body pre")).to_contain_text('"note": "***"')
    page.get_by_role("link", name="Show it unmasked").click()
    expect(page.locator("#body pre")).to_contain_text("<script>")
    expect(page.get_by_role("link", name="Show it unmasked")).to_have_count(0)
    with keyed.client() as client:
        (newest,) = client.activity(key="boss", limit=1).activities
        assert (newest.rpc, "unmasked=True" in newest.what) == ("GetMessage", True)
    page = signed_in(opened, keyed, VIEWER, f"message?topic=orders&id={message_id(0)}&unmasked=1")
    expect(page.get_by_text("This access key may not read bodies.")).to_be_visible()


def test_a_page_offers_the_changes_that_the_key_allows(keyed: Keyed, opened: Open) -> None:
    """The daemon refuses the others, also if a page sends their form with its token."""
    offered, pages = {}, []
    for key in (BOSS, ON_CALL, VIEWER):
        page = signed_in(opened, keyed, key, "schedule?name=other")
        pages.append(page)
        offered[key.access_key] = [page.get_by_role("button", name="Pause").count()]
        for path, name in PAGES:
            page.goto(keyed.url + path)
            offered[key.access_key].append(page.get_by_role("button", name=name, exact=True).count())
    assert offered == {"boss": [1, 1, 1, 1, 1], "on-call": [0, 1, 0, 0, 1], "viewer": [0, 0, 0, 0, 0]}
    page = pages[-1]
    token = page.locator("input[name=token]").first.input_value()
    quota = "kind=key&name=a&quota=topics&limit=1"
    for path, fields in (("schedules/pause", "name=hourly"), ("quotas/set", quota), ("audit/run", "why=")):
        answer = page.request.post(
            keyed.url + path,
            data=f"{fields}&token={token}",
            headers={"Origin": keyed.url.rstrip("/"), "Content-Type": "application/x-www-form-urlencoded"},
        )
        assert (answer.status, "lacks" in answer.text()) == (403, True), path


def test_a_read_only_console_offers_and_accepts_no_change(keyed: Keyed, opened: Open) -> None:
    """Not even to an admin key."""
    with console(keyed.daemon.address, "--read-only") as url:
        page = signed_in(opened, keyed._replace(url=url), BOSS, "schedule?name=hourly")
        for path in ("schedule?name=hourly", "schedules", "quotas", "audit"):
            page.goto(url + path)
            expect(page.locator("main form[method=post]")).to_have_count(0)
        token = page.locator("input[name=token]").first.input_value()
        answer = page.request.post(
            f"{url}schedules/pause",
            data=f"name=hourly&token={token}",
            headers={"Origin": url.rstrip("/"), "Content-Type": "application/x-www-form-urlencoded"},
        )
        assert (answer.status, "read-only" in answer.text()) == (403, True)
        page.goto("about:blank")  # the end of the console would be an error of an open page


@pytest.mark.parametrize(("width", "scheme"), [pytest.param(390, "light", marks=at_length), (1280, "dark")])
def test_screens_fit_the_window_and_have_no_barrier(keyed: Keyed, opened: Open, width: int, scheme: str) -> None:
    """On a phone and on a desktop: no wider than the window, a first heading, the command, no finding of axe."""
    page, axe = signed_in(opened, keyed, BOSS, width=width, color_scheme=scheme), Axe()
    screens = [*SCREENS, "settings?all=1", "quotas"]
    examined = drawn(screens, 3)  # by axe, which takes seconds for each
    for screen in screens:
        page.goto(keyed.url + screen)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), screen
        expect(page.get_by_role("heading", level=1)).to_have_count(1)
        expect(page.locator(".command code")).to_have_text(re.compile("^dmq "))
        if screen in examined:
            found = axe.run(page)
            assert found.violations_count == 0, (screen, found.generate_report())


def write_report(folder: Path) -> Path:
    """Write a report of two days with a loss, whose page would change itself by a script."""
    start_ms, hour_ms = 1_795_219_200_000, 3_600_000  # 2026-11-21 00:00 UTC
    summary = {
        "verdict": "lost",
        "exit_code": 20,
        "range": {"watermark_ms": start_ms + 30 * hour_ms},
        "hours": [
            {"start_ms": start_ms, "state": "lost", "scheduled": 9, "lost": 1},
            {"start_ms": start_ms + 25 * hour_ms, "state": "few_late", "scheduled": 500, "late": 1},
        ],
        "kinds": [{"kind": "LOST", "level": "lost", "meaning": "accepted, no end", "count": 1}],
        "findings_total": 1,
        "findings": [
            {"kind": "LOST", "level": "lost", "topic": "orders", "message_id": message_id(0), "detail": HOSTILE}
        ],
        "gaps_total": 1,
        "gaps": [
            {"cell": "c", "first": 1, "last": 9, "why": "file missing"}
            | {"after_ms": start_ms, "before_ms": start_ms + hour_ms}
        ],
    }
    folder.mkdir(parents=True)
    (folder / "report.html").write_text("<p id=p>untouched</p><script>p.textContent = 'changed'</script>")
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def figure(page: Page, name: str) -> Locator:
    """Return the value of a figure."""
    return page.locator(".figure", has=page.get_by_text(name, exact=True)).locator("dd").first


def names_in(page: Page) -> list[str]:
    """Return the names of the rows of the list."""
    return page.locator("#part tbody th[scope=row]").all_inner_texts()
