"""The report page as text: no data becomes markup, nothing is loaded, the same input gives the same bytes."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from spark_audit.report.html import page, write_html
from spark_audit.report.sections.findings import EACH_KIND_MIN, SHOWN_MAX, chosen
from spark_audit.report.sections.ledgers import FIRED, SCHEDULED, SPOOLED, residue
from spark_audit.report.text import shortened

HOSTILE = '</script><script>alert(1)</script><img src="x" onerror=alert(2)>\'"&\u202e\x00\ud800'
START_MS = 1_795_219_200_000
Data = dict[str, Any]


class Seen(HTMLParser):
    """Counts elements, and remembers attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def small(name: str = "orders") -> tuple[Data, list[Data]]:
    """A report in which every part has something, with ``name`` wherever the data has a name."""
    counts = {"scheduled": 10, "fired": 5, "cancelled": 1, "pending": 1, "overdue": 1, "lost": 1, "inconclusive": 1}
    lateness = {f"lateness_{each}_ms": 7 for each in ("p50", "p90", "p99", "p999", "max")}
    gap = {"first": 5, "last": 9, "why": name}
    cell = {"cell": name, "role": name, "first_sequence": 1, "last_sequence": 90, "events": 85, "gaps": [gap]}
    event = {"sequence": 3, "at_ms": START_MS, "kind": name, "queue_id": 1, "queue_offset": 4, "attempt": 0, "boot": 1}
    finding = {
        "kind": name, "severity": name, "rule": name, "cell": name, "topic": name, "group": name, "message_id": name,
        "entry": 4, "due_ms": START_MS, "window_start_ms": START_MS, "detail": name, "history": [event],
    }  # fmt: skip
    report = {
        "range": {"from_ms": START_MS, "to_ms": START_MS + 3_600_000, "watermark_ms": START_MS + 1_800_000},
        "window_ms": 600_000,
        "options": {"late_after_ms": 60_000},
        "verdict": "lost",
        "exit_code": 20,
        "cells": [cell],
        "scheduled": [
            {"window_start_ms": START_MS, "topic": name, "accepted_at_once": 3, "late": 2} | counts | lateness
        ],
        "fired": [{"topic": name, "group": name, "fired": 5, "acked": 4, "dead": 1}],
        "spooled": [{"cell": name, "type": name, "spooled": 2, "sent": 2}],
        "lateness": [{"topic": name, "upper_ms": 10, "count": 4}, {"topic": name, "upper_ms": -1, "count": 1}],
        "retries": [{"topic": name, "group": name, "attempt": 1, "failed": 2, "retried": 0, "acked": 3}],
        "dead": [{"topic": name, "group": name, "reason": name, "count": 1, "redriven": 0, "purged": 0}],
        "findings": {"total": 1, "listed": 1, "by_kind": {name: 1}},
    }
    return report, [finding]


def test_names_never_become_markup() -> None:
    """Hostile names in every place give the same elements and attributes as harmless ones, and are shown as text."""
    harmless, hostile = Seen(page(*small())), Seen(page(*small(HOSTILE)))
    assert hostile.tags["script"] == harmless.tags["script"] == 1
    assert hostile.tags["img"] == 0
    # a hostile kind of finding has no meaning of its own, as the harmless one here has none: the pages are alike
    assert hostile.tags - harmless.tags <= Counter({"title": 99})  # a name cut short carries the whole one as a title
    assert not [name for _, name, _ in hostile.attributes if name.startswith("on") or name in {"style", "src"}]
    assert "<script>alert(1)</script>" in hostile.text
    assert "\\u202e\\u0000\\ud800" in hostile.text


def test_the_file_can_be_written_for_any_names(tmp_path: Path) -> None:
    """Lone surrogates and nulls are no reason to have no report."""
    write_html(*small(HOSTILE), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def reversed_keys(value: Any) -> Any:  # noqa: ANN401 - any JSON
    if isinstance(value, dict):
        return {key: reversed_keys(each) for key, each in reversed(value.items())}
    return [reversed_keys(each) for each in value] if isinstance(value, list) else value


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    """Twice the same, and the order of keys means nothing."""
    report, findings = small()
    paths = [tmp_path / "first.html", tmp_path / "second.html"]
    write_html(report, findings, paths[0])
    write_html(reversed_keys(report), reversed_keys(findings), paths[1])
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_the_page_needs_nothing_and_may_nothing() -> None:
    """The policy allows our own style and script by their hashes alone; nothing names another place."""
    text = page(*small())
    seen = Seen(text)
    policy = next(value for tag, name, value in seen.attributes if name == "content" and "default-src" in value)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        content = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in content]
        assert [f"'sha256-{digest}'" in policy for digest in digests] == [True]
    links = [value for _, name, value in seen.attributes if name in {"href", "src", "xlink:href", "action"}]
    assert links
    assert all(link.startswith("#") for link in links)
    assert "://" not in text
    assert set(re.findall(r"url\(.", text)) == {"url(#"}


def test_every_drawing_describes_itself() -> None:
    """A drawing has a title and a description that its labels lead to; ids are unique; ornaments are hidden."""
    seen = Seen(page(*small()))
    ids = Counter(value for _, name, value in seen.attributes if name == "id")
    assert [each for each, times in ids.items() if times > 1] == []
    labels = [value for tag, name, value in seen.attributes if (tag, name) == ("svg", "aria-labelledby")]
    hidden = sum(1 for tag, name, _ in seen.attributes if (tag, name) == ("svg", "aria-hidden"))
    assert len(labels) + hidden == seen.tags["svg"]
    assert all(part in ids for label in labels for part in label.split())


@pytest.mark.parametrize("report", [{}, {"verdict": "of tomorrow"}, {"window_ms": 0, "scheduled": [{}], "cells": [{}]}])
def test_a_report_with_nothing_in_it_has_a_page(report: Data) -> None:
    """Missing parts are empty parts."""
    assert "<h1>" in page(report, [{}])


def test_every_verdict_names_the_next_step() -> None:
    """Each has a headline of its own, which one nobody knows has not, and steps."""
    verdicts = ["clean", "late", "lost", "inconclusive", "inconsistent", "of tomorrow"]
    texts = [page(small()[0] | {"verdict": verdict}, []) for verdict in verdicts]
    assert len({re.findall("<h1>(.+)</h1>", text)[0] for text in texts}) == len(verdicts)
    assert all(re.search("What to do now</h2><ol>\\s*<li>", text) for text in texts)


def test_clean_without_messages_is_reported_to_prove_nothing() -> None:
    """A wrong range must not look like good news."""
    report = small()[0] | {"verdict": "clean", "scheduled": [], "spooled": []}
    assert "No message fell into the audited range" in page(report, [])


def test_a_ledger_that_does_not_add_up_is_seen() -> None:
    """In its row and in the total."""
    report, _ = small()
    assert "off by" not in page(report, [])
    report["fired"][0]["acked"] -= 1
    assert page(report, []).count("off by 1<") == 2


def test_a_ledger_counts_every_part_of_the_contract() -> None:
    """One of each: the sum is the number of parts; what stands aside is not counted."""
    for ledger, parts in ((SCHEDULED, 7), (FIRED, 10), (SPOOLED, 7)):
        row = dict.fromkeys(ledger.parts, 1) | {ledger.sum_of: parts} | dict.fromkeys(ledger.aside, 5)
        assert residue(ledger, row) == 0
        assert residue(ledger, row | {"lost": 3}) == -2


def test_few_findings_are_all_there_by_weight() -> None:
    """LOST before LATE, and a kind nobody knows last; within a kind as they came."""
    findings = [{"kind": kind, "entry": number} for kind in ("LATE", "NEW", "LOST") for number in range(3)]
    assert [(row["kind"], row["entry"]) for row in chosen(findings)] == [
        (kind, number) for kind in ("LOST", "LATE", "NEW") for number in range(3)
    ]


def test_many_findings_leave_some_of_every_kind() -> None:
    """A flood of losses does not hide the one altered file."""
    kinds = {"LOST": 5000, "LATE": 900, "FILE_ALTERED": 1}
    shown = chosen([{"kind": kind} for kind, count in kinds.items() for _ in range(count)])
    assert len(shown) == SHOWN_MAX
    by_kind = Counter(row["kind"] for row in shown)
    assert by_kind == {"LOST": SHOWN_MAX - 1 - EACH_KIND_MIN, "FILE_ALTERED": 1, "LATE": EACH_KIND_MIN}


def test_the_rest_of_the_findings_is_named_with_the_file() -> None:
    """So that nobody takes the page for the whole."""
    report, findings = small()
    text = page(report | {"findings": {"total": 2000, "listed": 900, "by_kind": {}}}, findings * 900)
    assert f"{SHOWN_MAX} of them are in this page" in text
    assert "900 are in findings.csv and findings.jsonl" in text
    assert "1,100 more were counted only" in text


def test_a_long_history_keeps_its_beginning_and_its_end() -> None:
    """And says how much was left out."""
    report, findings = small()
    event = findings[0]["history"][0]
    findings[0]["history"] = [event | {"sequence": number} for number in range(1, 1001)]
    text = page(report, findings)
    assert "... 800 more in findings.jsonl" in text
    assert '<td class="n">1</td>' in text
    assert '<td class="n">1,000</td>' in text


def test_cutting_keeps_both_ends() -> None:
    """The length is what was asked for."""
    assert shortened("abcdefghij", 10) == "abcdefghij"
    assert shortened("abcdefghijk", 10) == "abcdef…ijk"
