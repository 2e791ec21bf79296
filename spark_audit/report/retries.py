"""The retry ladder of each group, and the dead letters by reason."""

from __future__ import annotations

from collections import defaultdict

from spark_audit.report import chart, text
from spark_audit.report.chart import Log, Plot
from spark_audit.report.markup import Child, Markup, el, joined, shortened
from spark_audit.report.windows import Row, whole

GROUPS_MAX = 8
ATTEMPTS_MAX = 24
ROWS_MAX = 300
_KEYS = (
    ("failed", "r-failed", "F", "failed"),
    ("retried", "r-retried", "R", "delivered again"),
    ("acked", "r-acked", "A", "finished"),
)
_WIDTH = 520.0
_REASONS = {
    "EXHAUSTED": "all attempts failed",
    "TOO_OLD": "too old",
    "FORWARDED": "given up by its consumer",
    "SENT_BACK": "sent back for good",
    "BY_OPERATOR": "by hand",
}
_DEAD_KEYS = (
    ("there", "d-there", "", "still there"),
    ("redriven", "d-redriven", "R", "sent again"),
    ("purged", "d-purged", "P", "thrown away"),
)
_Ladder = dict[int, dict[str, int]]


def ladder(report: Row) -> Markup:
    """Return the section: for each group, attempt by attempt, how many failed, came again and were finished."""
    name, heading = "retries", "The retry ladder"
    ladders: defaultdict[str, _Ladder] = defaultdict(dict)
    rows = report.get("retries") or []
    for row in rows:
        steps = ladders[str(row.get("group"))]
        step = steps.setdefault(whole(row, "attempt"), {"failed": 0, "retried": 0, "acked": 0})
        for key in step:
            step[key] += whole(row, key)
    if not any(total for steps in ladders.values() for step in steps.values() for total in step.values()):
        return chart.figure(name, heading, "", chart.nothing("No group has finished or failed anything in this range."))
    order = sorted(ladders, key=lambda group: (-sum(step["failed"] for step in ladders[group].values()), group))
    top = max(max(step.values()) for steps in ladders.values() for step in steps.values())
    scale = Log.to(top)
    cards = [_card(place, group, ladders[group], scale) for place, group in enumerate(order[:GROUPS_MAX])]
    lead = (
        "For each group by delivery attempt, over all topics: how many failed at it, how many copies came again for "
        "it, how many it finished. The scale is logarithmic, the same for all; those that failed most come first."
    )
    left = len(order) - GROUPS_MAX
    note = el("p", f"{text.plural(left, 'more group')} in the table only.", class_="note") if left > 0 else None
    entries = [(css, letter, words) for _, css, letter, words in _KEYS]
    figures = chart.folded("The ladder as a table, by topic", _table(rows))
    return chart.figure(name, heading, lead, chart.legend(entries), el("div", *cards, class_="cards"), note, figures)


def _card(place: int, group: str, steps: _Ladder, scale: Log) -> Markup:
    used = [attempt for attempt in sorted(steps) if any(steps[attempt].values())]
    attempts = used[:ATTEMPTS_MAX]
    row = 36.0
    plot = Plot(left=60, top=22, width=_WIDTH - 60 - 76, height=row * len(attempts))
    parts: list[Child] = [el("text", "attempt", x=46, y=17, class_="tick", text_anchor="end")]
    for value in scale.ticks():
        x = plot.left + plot.width * scale.part(value)
        parts.append(el("line", x1=x, y1=plot.top, x2=x, y2=plot.bottom, class_="grid"))
        parts.append(el("text", text.brief(value), x=x, y=plot.top - 5, class_="tick", text_anchor="middle"))
    for at, attempt in enumerate(attempts):
        y = plot.top + at * row
        parts.append(el("text", str(attempt), x=46, y=y + 21, class_="row-label", text_anchor="end"))
        bars: list[Child] = []
        for line, (key, css, letter, words) in enumerate(_KEYS):
            total = steps[attempt][key]
            if not total:
                continue
            width = max(plot.width * scale.part(total), 3)
            bar_y = y + 2 + line * 11
            said = f"{shortened(group, 80)}, attempt {attempt}\n{words}: {text.count(total)}"
            bars.append(chart.hover(plot.left, bar_y, width, 9, said, css))
            label = f"{letter} {text.count(total) if total < 1_000_000 else text.brief(total)}"
            bars.append(
                el("text", label, x=plot.left + width + 4, y=bar_y + 8, class_="tick tiny", text_anchor="start")
            )
        parts.append(el("g", *bars))
    failed = sum(step["failed"] for step in steps.values())
    acked = sum(step["acked"] for step in steps.values())
    described = f"{text.plural(failed, 'attempt')} failed, {text.count(acked)} finished it."
    left = len(used) - len(attempts)
    content = el("g", joined(parts), class_="hits")
    title = f"Retry ladder of the group {shortened(group, 80)}"
    return el(
        "div",
        el("h3", shortened(group, 60), title=group if len(group) > 60 else None),
        el("p", described + (f" The last {left} are in the table only." if left else ""), class_="note"),
        chart.svg(f"ladder-{place}", title, described, plot.bottom + 6, content, width=_WIDTH),
        class_="card",
    )


def _table(rows: list[Row]) -> Markup:
    cells = [
        [
            shortened(str(row.get("group")), 80),
            shortened(str(row.get("topic")), 80),
            str(whole(row, "attempt")),
            *(text.count(whole(row, key)) for key, *_ in _KEYS),
        ]
        for row in sorted(rows, key=lambda row: (str(row.get("group")), str(row.get("topic")), whole(row, "attempt")))
    ]
    headings = ["group", "topic", "attempt", *(words for *_, words in _KEYS)]
    return chart.table(headings, cells[:ROWS_MAX], caption=f"Attempts{_cut(len(cells))}", words=2)


def dead_letters(report: Row) -> Markup:
    """Return the section: dead letters by reason, and what became of them."""
    name, heading = "dead", "Dead letters"
    rows = report.get("dead") or []
    sums: defaultdict[str, dict[str, int]] = defaultdict(lambda: {"there": 0, "redriven": 0, "purged": 0, "count": 0})
    for row in rows:
        counted = sums[str(row.get("reason"))]
        total, redriven, purged = (whole(row, key) for key in ("count", "redriven", "purged"))
        counted["count"] += total
        counted["redriven"] += redriven
        counted["purged"] += purged
        counted["there"] += max(0, total - redriven - purged)
    total = sum(counted["count"] for counted in sums.values())
    if not total:
        return chart.figure(name, heading, "", chart.nothing("No dead letters in this range."))
    lead = f"{text.plural(total, 'message')} went to a dead-letter queue. By reason, and what became of them since."
    entries = [(css, letter, words) for _, css, letter, words in _DEAD_KEYS]
    order = sorted(sums, key=lambda reason: (-sums[reason]["count"], reason))
    cells = [
        [
            shortened(str(row.get("group")), 80),
            shortened(str(row.get("topic")), 80),
            reason_in_words(str(row.get("reason"))),
            *(text.count(whole(row, key)) for key in ("count", "redriven", "purged")),
        ]
        for row in sorted(rows, key=lambda row: (-whole(row, "count"), str(row.get("group")), str(row.get("topic"))))
    ]
    figures = chart.table(
        ["group", "topic", "reason", "dead letters", "sent again", "thrown away"],
        cells[:ROWS_MAX],
        caption=f"Dead letters by group and topic{_cut(len(cells))}",
        words=3,
    )
    return chart.figure(
        name,
        heading,
        lead,
        _dead_bars(order[:12], sums, total),
        chart.legend(entries),
        chart.folded("By group and topic, as a table", figures),
    )


def _dead_bars(order: list[str], sums: dict[str, dict[str, int]], total: int) -> Markup:
    plot = Plot(left=210, top=6, width=740, height=32.0 * len(order))
    top = max(sums[reason]["count"] for reason in order)
    parts: list[Child] = []
    for place, reason in enumerate(order):
        y = plot.top + place * 32
        words = reason_in_words(reason)
        parts.append(el("text", shortened(words, 26), x=plot.left - 8, y=y + 17, class_="row-label", text_anchor="end"))
        x = plot.left
        for key, css, letter, said in _DEAD_KEYS:
            if not (part := sums[reason][key]):
                continue
            width = max(plot.width * part / top, 2)
            parts.append(chart.hover(x, y + 2, width, 22, f"{words}\n{said}: {text.count(part)}", css))
            if letter and width > 16:
                parts.append(
                    el("text", letter, x=x + width / 2, y=y + 17, class_=f"letter in-{css}", text_anchor="middle")
                )
            x += width
        label = f"{text.count(sums[reason]['count'])} ({text.share(sums[reason]['count'], total)})"
        parts.append(el("text", label, x=x + 8, y=y + 17, class_="tick", text_anchor="start"))
    described = "; ".join(f"{reason_in_words(reason)}: {text.count(sums[reason]['count'])}" for reason in order)
    return chart.svg("dead-bars", "Dead letters by reason", described, plot.bottom + 4, el("g", *parts, class_="hits"))


def reason_in_words(reason: str) -> str:
    """Return a reason in plain words: of ``DEAD_EXHAUSTED``, or of ``exhausted``."""
    return _REASONS.get(reason.upper().removeprefix("DEAD_"), reason)


def _cut(rows: int) -> str:
    return "" if rows <= ROWS_MAX else f", the first {ROWS_MAX} of {text.count(rows)} rows (all are in report.json)"
