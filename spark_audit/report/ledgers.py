"""The ledgers as tables: every row shows its sum, and whether it adds up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spark_audit.report import chart, text
from spark_audit.report.markup import Child, Markup, el, shortened
from spark_audit.report.windows import Grid, Row, whole

ROWS_MAX = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """A sum and what it must be the sum of. ``aside`` is counted too, and is no part of the sum."""

    title: str
    note: str
    words: tuple[str, ...]
    sum_of: str
    parts: tuple[str, ...]
    aside: tuple[str, ...]


_ENDS = ("lost", "inconclusive")
SCHEDULED = Ledger(
    title="Scheduled: what was accepted for a delivery time",
    note="Late, early and twice are told of what was fired, or scheduled twice; they are no part of the sum.",
    words=("topic",),
    sum_of="scheduled",
    parts=("fired", "cancelled", "expired", "pending", "overdue", *_ENDS),
    aside=("late", "early", "duplicated", "accepted_at_once"),
)
FIRED = Ledger(
    title="Fired: what each group was meant to finish",
    note="Per topic and group; every message that became visible to the group, from the place on where it subscribed.",
    words=("topic", "group"),
    sum_of="fired",
    parts=("acked", "dead", "expired", "purged", "filtered", "unread", "in_flight", "in_retry", *_ENDS),
    aside=("duplicated",),
)
SPOOLED = Ledger(
    title="Spooled: what producers stored because a send failed",
    note="Per spool and type of entry.",
    words=("cell", "type"),
    sum_of="spooled",
    parts=("sent", "dead", "dropped", "pending", "overdue", *_ENDS),
    aside=(),
)


def ledgers(report: Row, grid: Grid) -> Markup:
    """Return the section with all ledgers that have rows; the first two are there always."""
    scheduled: list[Row] = [{"topic": topic, **tally.counts} for topic, tally in grid.topics.items()]
    tables = [_ledger(SCHEDULED, scheduled), _ledger(FIRED, report.get("fired") or [])]
    if report.get("spooled"):
        tables.append(_ledger(SPOOLED, report["spooled"]))
    lead = "Left of the equals sign what came in, right of it where it is now. Each row and the totals must add up."
    return chart.figure("ledgers", "The ledgers", lead, *tables)


def residue(ledger: Ledger, row: Row) -> int:
    """Return by how much a row does not add up: 0 when it does."""
    return whole(row, ledger.sum_of) - sum(whole(row, part) for part in ledger.parts)


def _ledger(ledger: Ledger, rows: Sequence[Row]) -> Markup:
    if not rows:
        return el("div", el("h3", ledger.title), chart.nothing("Nothing in this range."))

    def names(row: Row) -> tuple[str, ...]:
        return tuple(str(row.get(word)) for word in ledger.words)

    def weight(row: Row) -> tuple[int, int, tuple[str, ...]]:
        is_bad = residue(ledger, row) != 0 or any(whole(row, end) for end in _ENDS)
        return (0 if is_bad else 1, -whole(row, ledger.sum_of), names(row))

    order = sorted(rows, key=weight)
    shown, others = order[:ROWS_MAX], order[ROWS_MAX:]
    keys = (ledger.sum_of, *ledger.parts, *ledger.aside)
    total = _sum(keys, order)
    # a part that is 0 everywhere would only push the others off the screen
    parts = [key for key in ledger.parts if total[key] or key in _ENDS]
    aside = [key for key in ledger.aside if total[key]]
    line = _liner(ledger, parts, aside)
    body = [line([shortened(name, 60) for name in names(row)], row, "") for row in sorted(shown, key=weight)]
    if others:
        blanks: list[Child] = [""] * (len(ledger.words) - 1)
        body.append(line([f"{text.count(len(others))} others", *blanks], _sum(keys, others), ""))
    foot = line(["Total", *([""] * (len(ledger.words) - 1))], total, "total")
    head: list[Child] = [el("th", word, scope="col") for word in ledger.words]
    head.append(el("th", ledger.sum_of, scope="col", class_="n"))
    for place, key in enumerate(parts):
        head.append(
            el(
                "th",
                el("span", "= " if place == 0 else "+ ", class_="op"),
                key.replace("_", " "),
                scope="col",
                class_="n",
            )
        )
    head.append(el("th", "adds up", scope="col", class_="n"))
    head += [el("th", key.replace("_", " "), scope="col", class_="n aside") for key in aside]
    left_out = [key.replace("_", " ") for key in ledger.parts if key not in parts]
    note = ledger.note + (f" 0 everywhere: {', '.join(left_out)}." if left_out else "")
    content = el(
        "table",
        el("caption", ledger.title, class_="unseen"),
        el("thead", el("tr", *head)),
        el("tbody", *body),
        el("tfoot", foot),
        class_="ledger",
    )
    frame = el(
        "div", content, class_="scroll", tabindex="0", role="region", aria_label=f"{ledger.title}; scrolls sideways"
    )
    return el("div", el("h3", ledger.title), el("p", note, class_="note"), frame)


def _liner(ledger: Ledger, parts: Sequence[str], aside: Sequence[str]) -> Callable[[Sequence[Child], Row, str], Markup]:
    def line(names: Sequence[Child], row: Row, css: str) -> Markup:
        off = residue(ledger, row)
        verdict = (
            el("td", "✓ yes", class_="n yes") if not off else el("td", f"✗ off by {text.count(off)}", class_="n no")
        )
        cells = [el("th", names[0], scope="row"), *(el("td", name) for name in names[1:])]
        cells.append(_number(row, ledger.sum_of, "sum"))
        cells += [_number(row, key, "bad" if key in {*_ENDS, "overdue"} else "") for key in parts]
        return el("tr", *cells, verdict, *(_number(row, key, "aside") for key in aside), class_=css or None)

    return line


def _number(row: Row, key: str, css: str) -> Markup:
    value = whole(row, key)
    if not value:
        css = "zero aside" if css == "aside" else "zero"
    return el("td", text.count(value), class_=f"n {css}".strip())


def _sum(keys: Sequence[str], rows: Sequence[Row]) -> dict[str, int]:
    return {key: sum(whole(row, key) for row in rows) for key in keys}
