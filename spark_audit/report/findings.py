"""The findings: a choice of at most 500, each with its history folded away."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from spark_audit.report import chart, text
from spark_audit.report.markup import Child, Markup, el, joined, shortened
from spark_audit.report.windows import Row, whole

SHOWN_MAX = 500
EACH_KIND_MIN = 20  # a thousand losses must not hide the one altered file
HISTORY_ROWS_MAX = 6000  # of all histories in the page together, so that it stays small
# By weight. Class for the badge, and what the kind means.
KINDS = {
    "LOST": ("s-lost", "accepted, no end, and in no store"),
    "FILE_ALTERED": ("s-lost", "a file is not what its manifest says"),
    "LEDGER": ("s-lost", "a ledger does not add up"),
    "ILLEGAL": ("s-lost", "an order of events that cannot be"),
    "RECORD_REPEATED": ("s-lost", "one number of a cell was used twice"),
    "ORPHAN": ("s-lost", "an event or a snapshot's row without a beginning"),
    "FILE_MISSING": ("s-unsure", "a manifest names a file that is not there"),
    "TRAIL_GAP": ("s-unsure", "numbers of a cell are missing"),
    "INCONCLUSIVE": ("s-unsure", "no end, and the trail has a hole there"),
    "OVERDUE": ("s-late", "its time has passed and it still waits in the store"),
    "DUPLICATE_DELIVERY": ("s-late", "put into its queue more than once"),
    "DUPLICATE_ACCEPT": ("s-late", "accepted more than once"),
    "DUPLICATE_EXIT": ("s-late", "a group left the same place twice"),
    "EARLY": ("s-late", "fired before its delivery time"),
    "LATE": ("s-late", "fired too long after its delivery time"),
    "UNKNOWN_KIND": ("s-wait", "an event of a kind the audit does not know"),
}
_ORDER = {kind: place for place, kind in enumerate(KINDS)}


def chosen(findings: Sequence[Row]) -> list[Row]:
    """Return at most 500: some of every kind, then the gravest; in the order of weight, then as they came."""
    by_kind: defaultdict[str, list[Row]] = defaultdict(list)
    for finding in findings:
        by_kind[str(finding.get("kind"))].append(finding)
    order = sorted(by_kind, key=lambda kind: (_ORDER.get(kind, len(_ORDER)), kind))
    share = max(1, min(EACH_KIND_MIN, SHOWN_MAX // max(1, len(order))))
    room = SHOWN_MAX - sum(min(share, len(by_kind[kind])) for kind in order)
    taken: list[Row] = []
    for kind in order[:SHOWN_MAX]:
        more = max(0, min(room, len(by_kind[kind]) - share))
        room -= more
        taken += by_kind[kind][: share + more]
    return taken[:SHOWN_MAX]


def listed(report: Row, findings: Sequence[Row]) -> Markup:
    """Return the section: filter, the chosen findings, and where the others are."""
    name, heading = "findings", "Findings"
    summary = report.get("findings") or {}
    total = max(whole(summary, "total"), len(findings))
    if not total:
        return chart.figure(name, heading, "", chart.nothing("No findings. That is what one wishes for."))
    shown = chosen(findings)
    by_kind = {str(kind): int(number) for kind, number in (summary.get("by_kind") or {}).items()}
    by_kind = by_kind or dict(Counter(str(finding.get("kind")) for finding in findings))
    lead = f"{text.plural(total, 'finding')}; unfold one to see every event of its message."
    note = None
    if len(shown) < total:
        note = el(
            "p",
            f"{text.count(len(shown))} of them are in this page, some of every kind and the gravest first. "
            f"{text.count(len(findings))} are in findings.csv and findings.jsonl beside it",
            "." if total <= len(findings) else f"; {text.count(total - len(findings))} more were counted only.",
            class_="note",
        )
    history_max = max(12, min(200, HISTORY_ROWS_MAX // max(1, len(shown))))
    items = [_finding(finding, history_max) for finding in shown]
    return chart.figure(
        name,
        heading,
        lead,
        _kinds(by_kind),
        note,
        _filter(sorted({str(finding.get("kind")) for finding in shown}, key=lambda kind: (_ORDER.get(kind, 99), kind))),
        el("div", *items, class_="finding-list"),
    )


def _kinds(by_kind: dict[str, int]) -> Markup:
    rows: list[list[Child]] = []
    for kind in sorted(by_kind, key=lambda kind: (_ORDER.get(kind, len(_ORDER)), kind)):
        css, meaning = KINDS.get(kind, ("s-wait", ""))
        rows.append(
            [joined([el("span", shortened(kind, 40), class_=f"badge {css}")]), meaning, text.count(by_kind[kind])]
        )
    return chart.table(["kind", "what it means", "findings"], rows, caption="Findings by kind", words=2, css="kinds")


def _filter(kinds: list[str]) -> Markup:
    options = [el("option", "all kinds", value=""), *(el("option", shortened(kind, 40), value=kind) for kind in kinds)]
    return el(
        "div",
        el("label", "Kind ", el("select", *options, id="filter-kind")),
        el(
            "label",
            "Text ",
            el(
                "input",
                type="search",
                id="filter-text",
                placeholder="topic, group, message id, cell",
                autocomplete="off",
            ),
        ),
        el("button", "Unfold all", type="button", id="unfold"),
        el("button", "Fold all", type="button", id="fold"),
        el("output", "", id="filter-count", aria_live="polite"),
        class_="filter needs-script",
        hidden=True,
    )


def _finding(finding: Row, history_max: int) -> Markup:
    kind = str(finding.get("kind"))
    css, meaning = KINDS.get(kind, ("s-wait", "a kind this page does not know"))
    message_id = str(finding.get("message_id") or "")
    place = [str(finding[key]) for key in ("cell", "topic", "group") if finding.get(key)]
    head = el(
        "summary",
        el("span", shortened(kind, 40), class_=f"badge {css}"),
        el("span", shortened(" / ".join(place), 120), class_="place"),
        el("code", shortened(message_id, 60)) if message_id else None,
    )
    facts: list[tuple[str, Child]] = [
        ("What", meaning),
        ("Rule", _short(finding.get("rule"))),
        ("Detail", _short(finding.get("detail"))),
        ("Message", el("code", shortened(message_id, 300)) if message_id else None),
        ("Entry", _number(finding.get("entry"))),
        ("Due", text.utc(int(finding["due_ms"])) if finding.get("due_ms") is not None else None),
        ("Cell", _short(finding.get("cell"))),
    ]
    body = el("dl", joined(joined([el("dt", term), el("dd", value)]) for term, value in facts if value), class_="facts")
    return el("details", head, body, _history(finding, history_max), class_="finding", data_kind=kind)


def _short(value: object) -> str | None:
    return shortened(str(value), 500) if value not in {None, ""} else None


def _number(value: object) -> str | None:
    return text.count(value) if isinstance(value, int) else _short(value)


def _history(finding: Row, history_max: int) -> Markup:
    history = finding.get("history") or []
    if not history:
        return el("p", "The trail has no event of it.", class_="note")
    if isinstance(history, str):  # the form of findings.csv
        return el("p", shortened(history, 4000), class_="note")
    half = history_max // 2
    left_out = max(0, len(history) - history_max)
    events = [*history[:half], *history[-(history_max - half) :]] if left_out else history
    rows: list[list[Child]] = [
        [
            text.utc(event.get("at_ms")),
            shortened(str(event.get("kind")), 40),
            _place(event),
            _number(event.get("attempt")),
            text.utc(int(event["due_ms"])) if event.get("due_ms") is not None else None,
            _number(event.get("sequence")),
            _number(event.get("boot")),
        ]
        for event in events
    ]
    if left_out:
        rows.insert(half, [f"... {text.count(left_out)} more in findings.jsonl", *[None] * 6])
    headings = ["at (UTC)", "event", "queue: offset", "attempt", "due (UTC)", "sequence", "run"]
    return chart.table(headings, rows, caption="Its history, in the order of the trail", words=3)


def _place(event: Row) -> str | None:
    queue, offset = event.get("queue_id"), event.get("queue_offset")
    if queue is None:
        return None
    name = "lane" if queue == -1 else str(queue)
    return name if offset is None else f"{name}: {text.count(int(offset))}"
