"""The band on top: what was audited, what came of it in plain words, and what to do now."""

from __future__ import annotations

from dataclasses import dataclass

from spark_audit.report import text
from spark_audit.report.markup import Child, Markup, el, joined
from spark_audit.report.windows import Grid, Row, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What the band says of one verdict."""

    mark: str
    headline: str
    meaning: str
    steps: tuple[str, ...]


_EXPLAIN = "python -m spark_audit explain --trail <trail> <message id>"
WORDS = {
    "clean": Words(
        mark="✓",
        headline="Nothing is missing",
        meaning="Every message that was due by the watermark was fired, or has an end that the trail tells of. "
        "What still waits is in the newest snapshots, and is not due yet.",
        steps=("Nothing needs to be done.", "Keep this page with the day's records if you have to prove it later."),
    ),
    "late": Words(
        mark="T",
        headline="Nothing is lost, but not everything came in time, or came once",
        meaning="Every message has its end or still waits in a store. Some were late, early, overdue or delivered "
        "more often than allowed by the options of this audit.",
        steps=(
            (
                "Look at the heat map: a bad hour in all topics points at the machine (disk, CPU, restart), one "
                "bad topic at its consumers or its traffic."
            ),
            (
                "Overdue messages still wait in the store after their time. If the daemon runs, they should be gone at "
                "the next audit; if it does not, start it."
            ),
            "Compare with the runs and kills under trail health: after a kill, what fell due meanwhile is late.",
            "Nobody has to be woken for lateness alone, unless it grows.",
        ),
    ),
    "lost": Words(
        mark="L",
        headline="Messages are lost",
        meaning="They were accepted, no event tells of their end, and a snapshot taken later does not hold them. "
        "The trail of their cells has no gap, so this is not a hole in the records.",
        steps=(
            (
                "Keep the evidence: stop retention of the trail, and copy the trail and the cells' data directories "
                "before anything is restarted or cleaned."
            ),
            "Open the findings below, choose the kind LOST, and unfold one: its history ends where it was seen last.",
            f"For the whole way of one message: {_EXPLAIN}",
            "Tell the owners of the topics named there. The ids are in findings.csv; the senders can send these again.",
            "Report it as a defect with findings.jsonl: a loss with a whole trail must not happen.",
        ),
    ),
    "inconclusive": Words(
        mark="?",
        headline="It cannot be said whether something is lost",
        meaning="No loss is proven, but the trail has holes or the newest snapshots are missing, and messages that "
        "have no end fall into them. This is neither good nor bad news.",
        steps=(
            "Look at the gaps under trail health, and at the findings TRAIL_GAP and FILE_MISSING.",
            "If files were moved or not copied yet, bring them back and run the audit again.",
            "If a cell is silent, see whether its daemon runs: its watermark holds everything back.",
            "If there is no new snapshot, take one (dmq audit snapshot), and run the audit again.",
            "Events dropped to keep a bound are gone: these messages stay inconclusive. Give the outbox more room.",
        ),
    ),
    "inconsistent": Words(
        mark="!",
        headline="The records contradict themselves",
        meaning="A file was altered, an order of events cannot be, or a ledger does not add up. "
        "Do not trust the figures below until this is understood.",
        steps=(
            "Keep the trail and this output as they are.",
            "See the findings FILE_ALTERED, RECORD_REPEATED, ILLEGAL, ORPHAN and LEDGER: they name file and message.",
            "If a file was altered, restore it from a copy and run the audit again.",
            "If no file was altered, report it as a defect with findings.jsonl.",
        ),
    ),
}
_UNKNOWN = Words(
    mark="!",
    headline="A verdict this page does not know",
    meaning="The audit is of another version than this page.",
    steps=("Read report.json itself.",),
)
# Kinds that are good for one sentence in the band, in the order of their weight.
_TOLD = (
    ("LOST", "message lost", "messages lost"),
    ("INCONCLUSIVE", "inconclusive", "inconclusive"),
    ("OVERDUE", "overdue", "overdue"),
    ("LATE", "late", "late"),
    ("EARLY", "early", "early"),
    ("DUPLICATE_DELIVERY", "delivered twice", "delivered twice"),
    ("DUPLICATE_ACCEPT", "accepted twice", "accepted twice"),
    ("DUPLICATE_EXIT", "left its place twice", "left their place twice"),
    ("TRAIL_GAP", "gap in the trail", "gaps in the trail"),
    ("FILE_MISSING", "file missing", "files missing"),
    ("FILE_ALTERED", "file altered", "files altered"),
    ("RECORD_REPEATED", "number used twice", "numbers used twice"),
    ("ILLEGAL", "impossible order", "impossible orders"),
    ("ORPHAN", "without a beginning", "without a beginning"),
    ("LEDGER", "ledger that does not add up", "ledgers that do not add up"),
)


def band(report: Row, grid: Grid) -> Markup:
    """Return the band: verdict, its sentence, what was audited, what to do now."""
    verdict = str(report.get("verdict"))
    words = WORDS.get(verdict, _UNKNOWN)
    css = verdict if verdict in WORDS else "inconsistent"
    kinds = (report.get("findings") or {}).get("by_kind") or {}
    told = [text.plural(found, *words) for kind, *words in _TOLD if (found := whole(kinds, kind))]
    meaning = words.meaning
    if verdict == "clean" and not _messages(report, grid):
        meaning = "No message fell into the audited range, so nothing could be lost. Is it the range you meant?"
    head = el(
        "div",
        el("span", el("span", words.mark), class_="sign", aria_hidden="true"),
        el(
            "div",
            el("p", f"Verdict: {verdict} (exit code {whole(report, 'exit_code')})", class_="kicker"),
            el("h1", words.headline),
            el("p", meaning),
            el("p", "Found: ", el("strong", "; ".join(told)), ".") if told else None,
        ),
        class_="band-head",
    )
    steps = el("div", el("h2", "What to do now"), el("ol", *(el("li", step) for step in words.steps)), class_="steps")
    return el(
        "header", head, el("div", _facts(report, grid), steps, class_="band-body"), id="verdict", class_=f"band {css}"
    )


def _facts(report: Row, grid: Grid) -> Markup:
    times, cells = report.get("range") or {}, report.get("cells") or []
    options = report.get("options") or {}
    allowed = (
        f"{text.count(whole(options, 'late_max'))} late, {text.count(whole(options, 'duplicates_max'))} duplicates"
    )
    daemons = sum(1 for cell in cells if cell.get("role") == "daemon")
    spools = sum(1 for cell in cells if cell.get("role") == "spool")
    events = sum(whole(cell, "events") for cell in cells)
    gaps = sum(len(cell.get("gaps") or []) for cell in cells)
    facts: list[tuple[str, Child]] = [
        ("Range", text.span(whole(times, "from_ms"), whole(times, "to_ms"))),
        ("Judged up to", f"{text.utc(whole(times, 'watermark_ms'))} (watermark)"),
        ("Cells", f"{text.count(len(cells))}: {text.plural(daemons, 'daemon')}, {text.plural(spools, 'spool')}"),
        ("Trail", f"{text.plural(events, 'event')}, {text.plural(gaps, 'gap')}"),
        ("Messages", _messages_in_words(report, grid)),
        ("Windows", f"{text.duration(whole(report, 'window_ms'))} each"),
        (
            "Late means",
            (f"more than {text.duration(whole(options, 'late_after_ms'))} after the delivery time; allowed: {allowed}"),
        ),
        ("Grace", f"{text.duration(whole(options, 'grace_ms'))} before a message counts as overdue or lost"),
    ]
    return el("dl", joined(joined([el("dt", term), el("dd", value)]) for term, value in facts), class_="facts")


def _messages(report: Row, grid: Grid) -> int:
    spooled = sum(whole(row, "spooled") for row in report.get("spooled") or [])
    return grid.total["scheduled"] + grid.total["accepted_at_once"] + spooled


def _messages_in_words(report: Row, grid: Grid) -> str:
    spooled = sum(whole(row, "spooled") for row in report.get("spooled") or [])
    return (
        f"{text.count(grid.total['scheduled'])} scheduled, {text.count(grid.total['accepted_at_once'])} accepted at "
        f"once, {text.count(spooled)} spooled; {text.plural(len(grid.topics), 'topic')}"
    )
