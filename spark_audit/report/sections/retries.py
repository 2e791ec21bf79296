"""Retries section: the retry ladder of each group, and the dead letters by reason."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from spark_audit.report import chart, text
from spark_audit.report.look import MarkStyle
from spark_audit.report.table import ReportTable
from spark_audit.report.windows import Row, whole

GROUPS_MAX = 8
ATTEMPTS_MAX = 24
REASONS_MAX = 12
_STEPS = {
    "failed": MarkStyle("late", "failed", "F", is_hatched=True),
    "retried": MarkStyle("unsure", "delivered again", "R", is_hatched=True),
    "acked": MarkStyle("clean", "finished", "A"),
}
_REASONS = {
    "DEAD_EXHAUSTED": "all attempts failed",
    "DEAD_TOO_OLD": "too old",
    "DEAD_TOO_LATE": "not wanted that late",
    "DEAD_FORWARDED": "given up by its consumer",
    "DEAD_SENT_BACK": "sent back for good",
    "DEAD_BY_OPERATOR": "by hand",
    "FORWARD_REFUSED": "refused by the cluster",
}
_FATES = {
    "there": MarkStyle("t0", "still there"),
    "redriven": MarkStyle("clean", "sent again", "R"),
    "purged": MarkStyle("gone", "thrown away", "P"),
}
_Ladder = dict[int, dict[str, int]]


def ladder(report: Row) -> dict[str, Any]:
    """Return for each group the number of failed, retried and finished messages of each attempt."""
    rows = report.get("retries") or []
    ladders: defaultdict[str, _Ladder] = defaultdict(dict)
    for row in rows:
        step = ladders[str(row.get("group"))].setdefault(whole(row, "attempt"), dict.fromkeys(_STEPS, 0))
        for key in step:
            step[key] += whole(row, key)
    order = sorted(ladders, key=lambda group: (-sum(step["failed"] for step in ladders[group].values()), group))
    top = max((total for steps in ladders.values() for step in steps.values() for total in step.values()), default=0)
    cells = [
        [row.get("group"), row.get("topic"), *(whole(row, key) for key in ("attempt", *_STEPS))]
        for row in sorted(rows, key=lambda row: (str(row.get("group")), str(row.get("topic")), whole(row, "attempt")))
    ]
    headings = ["group", "topic", "attempt", *(look.words for look in _STEPS.values())]
    return {
        "cards": [_card(place, group, ladders[group], top) for place, group in enumerate(order[:GROUPS_MAX]) if top],
        "left_out": max(0, len(order) - GROUPS_MAX),
        "legend": _STEPS.values(),
        "figures": ReportTable("Attempts", headings, cells, words=2),
    }


def _card(place: int, group: str, steps: _Ladder, top: int) -> dict[str, Any]:
    used = [attempt for attempt in sorted(steps) if any(steps[attempt].values())]
    attempts = used[:ATTEMPTS_MAX]
    bars: chart.Marks = [
        {
            "x": 0.5,
            "x2": steps[attempt][key],
            "y": at,
            "key": key,
            "fill": look.fill,
            "label": f"{look.letter} {text.count(steps[attempt][key])}",
            "words": f"{text.visible(group)}, attempt {attempt}\n{look.words}: {text.count(steps[attempt][key])}",
        }
        for at, attempt in enumerate(attempts)
        for key, look in _STEPS.items()
        if steps[attempt][key]
    ]
    names: chart.Marks = [{"y": at, "label": str(attempt)} for at, attempt in enumerate(attempts)]
    failed, acked = (sum(step[key] for step in steps.values()) for key in ("failed", "acked"))
    beside = {"yOffset": {"field": "key", "scale": {"domain": list(_STEPS)}}}
    drawing = chart.drawn(
        f"ladder-{place}",
        f"Retry ladder of the group {text.shortened(group, 80)}",
        f"{text.plural(failed, 'attempt')} failed, {text.count(acked)} finished it.",
        x=chart.decades("x", top, orient="top", domain=False, ticks=False),
        y=chart.places(len(attempts)),
        layers=[
            chart.boxes(bars, **beside),
            chart.texts(bars, {"x": {"field": "x2"}, **beside}, align="left", dx=4, fontSize=10.5),
            chart.texts(names, {"x": {"value": -14}}, align="right", fill="var(--ink)"),
            chart.texts([{"label": "attempt"}], {"x": {"value": -10}, "y": {"value": -9}}, align="right"),
        ],
        height=36 * len(attempts),
        padding=(22, 76, 6, 60),
        width=520,
    )
    return {"group": group, "chart": drawing, "left_out": len(used) - len(attempts)}


def dead_letters(report: Row) -> dict[str, Any]:
    """Return dead letters by reason, with the numbers redriven, purged and remaining."""
    rows = report.get("dead") or []
    sums: defaultdict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(("count", *_FATES), 0))
    for row in rows:
        counted = sums[_reason(row)]
        for key in ("count", "redriven", "purged"):
            counted[key] += whole(row, key)
        counted["there"] += max(0, whole(row, "count") - whole(row, "redriven") - whole(row, "purged"))
    order = sorted(sums, key=lambda reason: (-sums[reason]["count"], reason))[:REASONS_MAX]
    total = sum(counted["count"] for counted in sums.values())
    cells = [
        [
            row.get("group"),
            row.get("topic"),
            _reason(row),
            *(whole(row, key) for key in ("count", "redriven", "purged")),
        ]
        for row in sorted(rows, key=lambda row: (-whole(row, "count"), str(row.get("group")), str(row.get("topic"))))
    ]
    headings = ["group", "topic", "reason", "dead letters", "sent again", "thrown away"]
    return {
        "total": total,
        "bars": _dead_bars([(reason, sums[reason]) for reason in order], total) if total else None,
        "legend": _FATES.values(),
        "figures": ReportTable("Dead letters by group and topic", headings, cells, words=3),
    }


def errors(report: Row) -> ReportTable:
    """Return failures by group and reported error."""
    cells = [
        [row.get("group"), text.visible(str(row.get("error"))), *(whole(row, key) for key in ("failures", "dead"))]
        for row in report.get("errors") or []
    ]
    return ReportTable("Failures by error", ["group", "error", "failures", "dead letters"], cells, words=2)


def _dead_bars(reasons: Sequence[tuple[str, dict[str, int]]], total: int) -> chart.Chart:
    bars: chart.Marks = []
    signs: chart.Marks = []
    names: chart.Marks = []
    top = max(counted["count"] for _, counted in reasons)
    for place, (reason, counted) in enumerate(reasons):
        end = 0
        for key, look in _FATES.items():
            if part := counted[key]:
                words = f"{reason}\n{look.words}: {text.count(part)}"
                bars.append({"x": end, "x2": end + part, "y": place, "fill": look.fill, "words": words})
                if look.letter and part * 40 > top:
                    signs.append({"x": end + part / 2, "y": place, "look": look})
            end += part
        label = f"{text.count(counted['count'])} ({text.share(counted['count'], total)})"
        names.append({"y": place, "reason": text.shortened(reason, 26), "x": end, "label": label})
    return chart.drawn(
        "dead-bars",
        "Dead letters by reason",
        "; ".join(f"{reason}: {text.count(counted['count'])}" for reason, counted in reasons),
        x={"field": "x", "type": "quantitative", "axis": None, "scale": {"domain": [0, top], "nice": False}},
        y=chart.places(len(reasons), gap=0.3),
        layers=[
            chart.texts(names, {"x": {"value": -8}, "text": {"field": "reason"}}, align="right", fill="var(--ink)"),
            chart.boxes(bars),
            chart.letters(signs),
            chart.texts(names, align="left", dx=8),
        ],
        height=32 * len(reasons),
        padding=(6, 150, 4, 210),
    )


def _reason(row: Row) -> str:
    reason = str(row.get("reason"))
    return _REASONS.get(reason, text.visible(reason))
