"""Made-up reports as the audit writes them, a browser to look at them, and a watch over every page."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from playwright.sync_api import Browser, BrowserContext, Dialog, Error, Page
from support.rigs.services.browsers import chromium

from spark_audit.report.html import write_html

START_MS = 1_795_219_200_000  # 2026-11-21 00:00 UTC
WINDOW_MS = 600_000
HOSTILE = '<script>alert("1")</script><img src=x onerror=alert(2)>"\'&\u202e\x07'
KINDS = {"LOST": 9, "INCONCLUSIVE": 20, "LATE": 60, "OVERDUE": 8, "TRAIL_GAP": 4, "DUPLICATE_DELIVERY": 3}
BOUNDS = [power * 10**ten for ten in range(6) for power in (1, 2, 5)]
Report = dict[str, Any]


class Made(NamedTuple):
    """A report and its findings."""

    report: Report
    findings: list[Report]


def _counts(rng: random.Random, base: int, *, is_bad: bool, is_old: bool) -> Report:
    scheduled = max(1, round(base * rng.uniform(0.7, 1.3)))
    row: Report = dict.fromkeys(
        ("cancelled", "expired", "pending", "overdue", "lost", "inconclusive", "late", "early", "duplicated"), 0
    )
    row["cancelled"] = rng.randrange(1 + scheduled // 50)
    if not is_old:
        row["pending"] = scheduled - row["cancelled"]
    elif is_bad:
        row["late"], row["overdue"] = scheduled // 3, scheduled // 20
        row["lost"] = rng.choice((0, 0, 0, 3))
        row["inconclusive"] = rng.choice((0, 0, 5))
    elif rng.random() < 0.01:
        row["late"], row["duplicated"] = 2, 1
    left = ("cancelled", "expired", "pending", "overdue", "lost", "inconclusive")
    row["fired"] = max(0, scheduled - sum(row[key] for key in left))
    row["scheduled"] = row["fired"] + sum(row[key] for key in left)
    row["accepted_at_once"] = scheduled * 2
    scale = 300 if is_bad else 1
    names = ("p50", "p90", "p99", "p999", "max")
    for name, low, high in zip(names, (1, 2, 4, 12, 30), (2, 4, 9, 60, 900), strict=True):
        row[f"lateness_{name}_ms"] = rng.randrange(low, high) * scale if row["fired"] else None
    return row


def _cells(rng: random.Random, cells: int, gaps: int) -> list[Report]:
    made = []
    for number in range(cells):
        last = rng.randrange(500_000, 3_000_000)
        firsts = sorted(rng.sample(range(1000, last - 1000, 500), gaps if number % 3 == 1 else 0))
        found = [{"first": first, "last": first + rng.randrange(1, 400), "why": "file missing"} for first in firsts]
        made.append(
            {
                "cell": f"{'pay' if number % 3 else 'shop'}-{number}", "role": "spool" if number % 3 == 2 else "daemon",
                "first_sequence": 1, "last_sequence": last, "events": last, "files": last // 50_000 + 1,
                "runs": 1 + number % 4, "kills": number % 2, "first_at_ms": START_MS,
                "last_at_ms": START_MS + 80_000_000, "is_closed": number % 4 == 0,
                "snapshot_sequence": None if number == 1 else last - 5000,
                "snapshot_at_ms": None if number == 1 else START_MS + 79_000_000, "gaps": found,
            }
        )  # fmt: skip
    return made


def _finding(rng: random.Random, kind: str, number: int, topic: str, events: int) -> Report:
    at_ms = START_MS + 40_000_000 + number * 1000
    kinds = ("SCHEDULED", "DELIVERED", "NACKED", "RETRIED")
    history = [
        {
            "sequence": 1000 * number + step, "at_ms": at_ms + step * 10_000, "kind": kinds[min(step, 2 + step % 2)],
            "queue_id": -1 if step > 2 else 3, "queue_offset": step * 17 if step else None, "attempt": step,
            "due_ms": at_ms + 60_000, "boot": 2,
        }
        for step in range(events)
    ]  # fmt: skip
    return {
        "kind": kind, "severity": "error", "rule": "1.4 (4)", "cell": "shop-0", "topic": topic, "group": "billing",
        "message_id": f"01{rng.getrandbits(128):032X}", "entry": number, "due_ms": at_ms + 60_000,
        "window_start_ms": at_ms // WINDOW_MS * WINDOW_MS, "detail": f"not in the snapshot at {1000 + number}",
        "history": history,
    }  # fmt: skip


def make(
    topics: list[str], windows: int, verdict: str, kinds: dict[str, int], cells: int = 4, events: int = 3, seed: int = 7
) -> Made:
    """Make a report of that shape: a bad hour in the middle, dead letters, gaps, retries; ledgers add up."""
    rng = random.Random(seed)
    now = round(windows * 0.9)
    bad = range(windows // 2, windows // 2 + max(1, min(6, windows // 8)))
    scheduled: list[Report] = [
        {"window_start_ms": START_MS + window * WINDOW_MS, "topic": topic}
        | _counts(rng, 4000 // (place + 1) + 5, is_bad=window in bad and place % 3 == 0, is_old=window < now)
        for window in range(windows)
        for place, topic in enumerate(topics)
        if place < 6 or rng.random() < 0.7
    ]
    sums = dict.fromkeys(topics, 0)
    for row in scheduled:
        sums[row["topic"]] += row["fired"]
    fired, retries, dead = [], [], []
    for place, topic in enumerate(topics):
        for group in ("billing", f"mail-{place}"):
            total = sums[topic]
            gone, unread, lost = total // 300, total // 70, 3 if verdict == "lost" and place == 0 else 0
            fired.append(
                {
                    "topic": topic, "group": group, "fired": total, "acked": total - gone - unread - lost, "dead": gone,
                    "expired": 0, "purged": 0, "filtered": 0, "unread": unread, "in_flight": 0, "in_retry": 0,
                    "lost": lost, "inconclusive": 0, "duplicated": place,
                }
            )  # fmt: skip
            waiting = total
            for attempt in range(1, 17):
                failed = waiting // 9
                step = {"attempt": attempt, "failed": failed, "retried": waiting if attempt > 1 else 0}
                retries.append({"topic": topic, "group": group, "acked": waiting - failed} | step)
                waiting = failed
            for reason, part in (("DEAD_EXHAUSTED", 2), ("DEAD_TOO_OLD", 5), ("DEAD_BY_OPERATOR", 9)):
                count = gone // part
                letters = {"reason": reason, "count": count, "redriven": count // 3, "purged": count // 7}
                dead.append({"topic": topic, "group": group} | letters)
    lateness = [
        {"topic": topic, "upper_ms": upper, "count": round(9e5 / (place + 1) / (1 + step**3))}
        for place, topic in enumerate(topics)
        for step, upper in enumerate([0, *BOUNDS])
    ]
    findings = [
        _finding(rng, kind, number, topics[number % len(topics)], events)
        for kind, count in sorted(kinds.items())
        for number in range(count)
    ]
    listed = sum(kinds.values())
    spooled = dict.fromkeys(("dead", "dropped", "overdue", "lost", "inconclusive"), 0)
    report = {
        "format": 1,
        "range": {
            "from_ms": START_MS, "to_ms": START_MS + windows * WINDOW_MS, "watermark_ms": START_MS + now * WINDOW_MS,
        },
        "window_ms": WINDOW_MS,
        "options": {
            "late_after_ms": 60_000, "late_max": 0, "duplicates_max": 0, "grace_ms": 120_000,
            "writer_timeout_ms": 600_000,
        },
        "verdict": verdict,
        "exit_code": {"clean": 0, "late": 10, "lost": 20, "inconclusive": 30, "inconsistent": 40}[verdict],
        "cells": _cells(rng, cells, 0 if verdict in {"clean", "late"} else 4),
        "scheduled": scheduled, "fired": fired, "lateness": lateness, "retries": retries, "dead": dead,
        "spooled": [{"cell": "pay-2", "type": "refund", "spooled": 1200, "sent": 1180, "pending": 20} | spooled],
        "findings": {"total": listed, "listed": listed, "by_kind": kinds},
    }  # fmt: skip
    return Made(report, findings)


def ordinary() -> Made:
    """A day of seven topics with a bad hour."""
    names = ["orders", "payments.refund", "mail", "invoices", "loyalty-points", "stock", "%DLQ%billing"]
    return make(names, 144, "lost", KINDS)


def of_verdict(verdict: str) -> Made:
    """Some hours of two topics."""
    return make(["orders", "payments.refund"], 24, verdict, {} if verdict == "clean" else dict.fromkeys(KINDS, 2))


def extreme() -> Made:
    """1 500 windows, 240 topics, 60 cells, thousands of findings with long histories, and names that attack."""
    names = [HOSTILE, "x" * 127, *(f"topic-{number:03}" for number in range(238))]
    made = make(names, 1500, "inconsistent", {"LOST": 1500, "ILLEGAL": 3, "FILE_ALTERED": 1, HOSTILE: 2}, 60, 80)
    made.findings[0] |= {"message_id": HOSTILE, "detail": HOSTILE * 40, "group": HOSTILE, "cell": HOSTILE}
    made.report["cells"][0]["cell"] = HOSTILE
    made.report["cells"][1]["gaps"] = [{"first": 5, "last": 9, "why": HOSTILE}]
    made.report["dead"][0]["reason"] = HOSTILE
    made.report["retries"][0]["group"] = HOSTILE
    return made


def empty() -> Made:
    """One window in which nothing happened."""
    made = make(["nothing"], 1, "clean", {}, cells=0)
    none: Report = {key: [] for key in ("scheduled", "fired", "spooled", "lateness", "retries", "dead")}
    return Made(made.report | none, [])


def tiny() -> Made:
    """One message of one topic."""
    row = {"window_start_ms": START_MS, "topic": "orders", "scheduled": 1, "fired": 1, "lateness_p50_ms": 0}
    return Made(empty().report | {"scheduled": [row], "lateness": [{"topic": "orders", "upper_ms": 0, "count": 1}]}, [])


MAKERS: dict[str, Callable[[], Made]] = {"ordinary": ordinary, "extreme": extreme, "empty": empty, "tiny": tiny} | {
    verdict: lambda verdict=verdict: of_verdict(verdict)
    for verdict in ("clean", "late", "inconclusive", "inconsistent")
}


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of a report by the name of its maker; made once."""
    folder = tmp_path_factory.mktemp("reports")

    def page_of(name: str) -> Path:
        path = folder / f"{name}.html"
        if not path.exists():
            write_html(*MAKERS[name](), path)
        return path

    return page_of


@pytest.fixture(scope="module")  # a running browser is a running event loop: no later test could start its own
def browser() -> Iterator[Browser]:
    """The system's Chromium."""
    with chromium() as launched:
        yield launched


class Watched(NamedTuple):
    """An open page and all it did that a report must not do."""

    page: Page
    wrong: list[str]


Open = Callable[..., Watched]


def _open(browser: Browser, path: Path, wrong: list[str], **options: Any) -> BrowserContext:  # noqa: ANN401 - playwright's
    def dismiss(dialog: Dialog) -> None:
        wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    context = browser.new_context(offline=True, **options)
    page = context.new_page()
    page.on("console", lambda said: wrong.append(f"console: {said.text}"))
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("dialog", dismiss)
    page.on("request", lambda sent: None if sent.url == path.as_uri() else wrong.append(f"request: {sent.url}"))
    page.goto(path.as_uri(), wait_until="load")
    return context


def _size(width: int) -> dict[str, Any]:
    return {"width": width, "height": 900}


@pytest.fixture
def opened(browser: Browser, pages: Callable[[str], Path]) -> Iterator[Open]:
    """Open a report in a window of its own; when the test ends no page may have done what it must not."""
    contexts: list[BrowserContext] = []
    wrong: list[str] = []

    def open_page(name: str, width: int = 1280, **options: Any) -> Watched:  # noqa: ANN401 - playwright's own options
        contexts.append(_open(browser, pages(name), wrong, viewport=_size(width), **options))
        return Watched(contexts[-1].pages[0], wrong)

    yield open_page
    for context in contexts:
        try:
            context.close()
        except Error as error:
            wrong.append(f"close: {error}")
    assert wrong == []


@pytest.fixture(scope="module")
def windows(browser: Browser) -> Iterator[dict[str, Watched]]:
    """The windows that tests share which only look, by the report in them."""
    found: dict[str, Watched] = {}
    yield found
    for each in found.values():
        each.page.context.close()


@pytest.fixture
def seen(browser: Browser, pages: Callable[[str], Path], windows: dict[str, Watched]) -> Iterator[Open]:
    """As ``opened``, in a window that others look at as well: a large report takes seconds to be drawn."""

    def look(name: str, width: int = 1280, color_scheme: Any = "light") -> Watched:  # noqa: ANN401 - as playwright has it
        if name not in windows:
            wrong: list[str] = []
            windows[name] = Watched(_open(browser, pages(name), wrong, viewport=_size(width)).pages[0], wrong)
        page = windows[name].page
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=color_scheme)
        return windows[name]

    yield look
    assert [wrong for each in windows.values() for wrong in each.wrong] == []
