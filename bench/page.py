"""The text of the page: from what is kept to Markdown. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from bench.figures import STEADY_SPREAD, number

BEGIN = "<!-- by hand: this part is kept when the page is generated -->"
END = "<!-- end of the part by hand -->"
NOTHING_BY_HAND = "No profile has been written down yet; the cost table below is measured."

_INTRODUCTION = (
    "Measured throughput, lateness and costs, next to floors and peers, with the missed goals. `python -m bench "
    "report` generates this page from `bench/results.json`, except the marked part. A figure is the median of its "
    f"rounds; with a *, its rounds differ by more than a factor of {STEADY_SPREAD}: it is unreliable."
)
_AGAIN = (
    '`make bench`; with `ARGS="--peer"` next to Apache RocketMQ, with `ARGS="--quick"` as a check. `python -m bench '
    "NAME` measures one part."
)

# Details of figures on the page, in this order.
_DETAILS = {
    "p50_ms": "p50 {} ms",
    "p99_ms": "p99 {} ms",
    "cpu_us": "{} us CPU",
    "cpu_share": "{} processors busy",
    "rss_before_mb": "resident before {} MB",
    "rss_after_mb": "after {} MB",
}
_SHARES = {"refused_share": "{:.0%} refused", "too_late_share": "{:.0%} after the deadline"}

_Figure = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """A part of the page: the figures of one name. ``shows`` chooses which of them are in its table."""

    group: str
    title: str
    text: str
    picture: str = ""
    shows: Callable[[str], bool] = lambda _: True


def _but_extremes(name: str) -> bool:
    return not name.endswith((".p999", ".max")) and ".in_process." not in name


_SECTIONS = (
    _Section(
        group="grpc_send",
        title="Durable sends",
        text="One message of 200 bytes per call, by kind and calls in flight, from a native load generator on the same "
        "machine. OK comes after the sync of the log. The floors are servers that store nothing, an echo on this "
        'project\'s transport and one on grpcio, and this daemon with `transport = "grpcio"`; `disk` are appends of '
        "4 KiB, each synced.",
        shows=lambda name: not name.endswith(".to_peer"),
        picture="send",
    ),
    _Section(
        group="fronts",
        title="Front processes",
        text="Durable sends, receives and deliveries with `processes = auto`, next to one process; `to_peer` next to "
        "RocketMQ. `cpu.store` is the CPU of the store process for a send.",
        shows=lambda name: ".projected." not in name,
    ),
    _Section(
        group="receive",
        title="Receive and acknowledge",
        text="A backlog is received 32 messages at a time; each batch is acknowledged durably in one call. The floor "
        "is the same in one process, without a wire.",
        picture="receive",
    ),
    _Section(
        group="enqueue",
        title="Sends in process",
        text="One caller sends 100 messages, waits until they are durable, and sends the next 100, all with one delay "
        "or `scattered` over a day. The floor is RocksDB alone with the same rows, in one family, synced as often.",
    ),
    _Section(
        group="lateness",
        title="Lateness",
        text="Messages with delays of 1 to 5 s are sent at 2,000 or `10000` a second for 20 s, next to a million "
        "pending ones. `queue` ends when the message is durable in its queue (bound of a bucket), `consumer` when one "
        "of 16 long polls has it. `sent` is the rate that was reached.",
        picture="lateness",
        shows=_but_extremes,
    ),
    _Section(
        group="wakeup",
        title="Wake-up of a long poll",
        text="One message at a time to four waiting receives, from the answer to its send (0 if the message is there "
        "before), or from the send (`whole`).",
        picture="wakeup",
    ),
    _Section(
        group="burst",
        title="Burst",
        text="20,000 messages are due at one instant: until the last is durable in its queue, or acknowledged by a "
        "`client` with 16 long polls.",
        picture="burst",
    ),
    _Section(
        group="overload",
        title="Overload",
        text="Twice the peak rate is offered, open loop. Daemon and load generator each have half of the processors, "
        "so these rates are lower than those above. `goodput` are accepted messages, `memory` is the growth.",
        picture="overload",
    ),
    _Section(
        group="indexing",
        title="Cost of an indexed property",
        text="Delayed sends in process, 100 to a call, without and with an indexed user property of 12 bytes.",
    ),
    _Section(
        group="pending",
        title="Cost of pending messages",
        text="A million messages of 286 bytes, filled in process or through gRPC, until neither memory nor disk "
        "changes; `disk_full` is right after the last send. Then SIGKILL, and a start: `ready_beyond_imports` is from "
        "the end of the imports to serving.",
        picture="pending",
    ),
    _Section(
        group="sizes",
        title="Cost by number of pending messages",
        text="The same, filled in process. The fixed memory of a process makes few messages look expensive.",
    ),
    _Section(
        group="cluster",
        title="In front of a cluster",
        text="2,000 delayed messages a second to RocketMQ's OK (`lateness`), 20,000 due at once (`forwarded`), and "
        "sends without a delay (`hop`, by calls in flight).",
    ),
    _Section(
        group="cluster_away",
        title="Embedded topics while the cluster is away",
        text="Lateness of an embedded topic at 200 messages a second, next to the same with the cluster available.",
    ),
    _Section(
        group="queue_clients",
        title="Queue clients",
        text="This project's Python client next to Apache's Java client, over the classic protocol to the same broker: "
        "sends by calls in flight, a backlog (`consume`), and 500 messages a second from the store to the handler "
        "(`late`). `stopped`: 100 sends a second with fault avoidance, while one of two brokers is stopped for 26 s.",
    ),
    _Section(
        group="replica",
        title="Second copy",
        text="Durable delayed sends with `replica = async` and `sync`, by calls in flight.",
    ),
)


def page_of(kept: Mapping[str, Any], pictures: Mapping[str, str], by_hand: str) -> str:
    """Return the whole page. ``pictures`` are paths by name; ``by_hand`` is what stood between the marks before."""
    groups: dict[str, list[_Figure]] = {}
    for figure in kept["figures"]:
        groups.setdefault(figure["group"], []).append(figure)
    parts = [
        "# Performance",
        _INTRODUCTION,
        *_machine(kept),
        "## Goals",
        *_goals(kept["figures"]),
        "## What limits it",
        f"{BEGIN}\n\n{by_hand.strip()}\n\n{END}",
        *_costs(groups.get("costs", []), pictures, kept),
    ]
    for section in _SECTIONS:
        if section.group in groups:
            parts += _section(section, groups[section.group], pictures, kept)
    return "\n\n".join(parts) + "\n"


def by_hand_of(page: str) -> str:
    """Return what stands between the marks of a page; the usual line if the marks are not there."""
    before, begin, rest = page.partition(BEGIN)
    text, end, _ = rest.partition(END)
    return text.strip() if before and begin and end else NOTHING_BY_HAND


def _machine(kept: Mapping[str, Any]) -> Iterator[str]:
    machine, options = kept["machine"], kept["options"]
    sync, libraries = machine["disk_sync_ms"], machine["libraries"]
    facts = {
        "Machine": f"{machine['cpus']} processors ({machine['cpu']}), {machine['memory_gb']} GB of memory, "
        f"Linux {machine['kernel']}; client and server share it.",
        "Disk": f"a sync of 4 KiB takes {number(sync['p50'])} ms (median), {number(sync['p99'])} ms (p99).",
        "Python": f"{machine['python']}; {', '.join(f'{name} {version}' for name, version in libraries.items())}.",
        "Load average": f"{machine['load_average'][0]:.2f} when it began.",
        "Peer": f"{options['peer']}.",
        "Last run": f"{_date(kept)}, {kept['options'].get('rounds', 1)} rounds.",
        "Again": _AGAIN,
    }
    yield "\n".join(f"- **{name}**: {fact}" for name, fact in facts.items())
    if not options["native_load"]:
        yield "The load came from Python, which is a limit itself: rates through gRPC are those of the load generator."
    if options["is_quick"]:
        yield "This was a quick run with small sizes: its figures only prove that measuring works."
    if options["failed"]:
        yield "\n".join(
            ["Not measured:", "", *(f"- {name}: {_cell(str(why))}" for name, why in options["failed"].items())]
        )


def _goals(figures: Sequence[_Figure]) -> Iterator[str]:
    judged = [figure for figure in figures if figure["is_met"] is not None]
    missed = [figure for figure in judged if not figure["is_met"]]
    if not judged:
        yield "None was measured."
        return
    yield f"{len(judged) - len(missed)} of {len(judged)} goals are met."
    rows = [
        [
            f"`{figure['name']}`",
            f"{_value(figure)} {figure['unit']}" if not figure["goal"].endswith("%") else f"{figure['ratio']:.0%}",
            figure["goal"],
        ]
        for figure in missed
    ]
    if rows:
        yield _table(["missed", "measured", "goal"], rows)


def _costs(figures: Sequence[_Figure], pictures: Mapping[str, str], kept: Mapping[str, Any]) -> Iterator[str]:
    if not figures:
        return
    yield "## The cost of one durable send"
    yield (
        "Microseconds of CPU per delayed message of 200 bytes, by step; for the sync, waiting time. A batch has as "
        "many messages as are in flight."
    )
    yield from _image("costs", "The cost of one durable send", pictures)
    flights = sorted({figure["details"]["in_flight"] for figure in figures})
    found = {(figure["details"]["step"], figure["details"]["in_flight"]): figure["value"] for figure in figures}
    steps = {figure["details"]["step"]: figure["details"]["what"] for figure in figures}
    rows = [[step, what, *(number(found[step, each]) for each in flights)] for step, what in steps.items()]
    totals = [number(sum(found[step, each] for step in steps if step != "sync")) for each in flights]
    yield _table(
        ["step", "what", *(f"{each} in flight" for each in flights)], [*rows, ["**CPU**", "without the sync", *totals]]
    )
    yield from _measured(figures[0], kept)


def _section(
    section: _Section, figures: Sequence[_Figure], pictures: Mapping[str, str], kept: Mapping[str, Any]
) -> Iterator[str]:
    yield f"## {section.title}"
    yield section.text
    yield from _image(section.picture, section.title, pictures)
    shown = [figure for figure in figures if section.shows(figure["name"])]
    rows = [
        [
            f"`{figure['name']}`",
            f"{_value(figure)} {figure['unit']}{'' if figure['is_steady'] else ' *'}",
            f"{number(figure['min'])} .. {number(figure['max'])}" if "min" in figure else "",
            "<br>".join(_beside(each) for each in [figure["beside"], *figure["also"]] if each),
            f"{figure['goal'] or ''}{' **missed**' if figure['is_met'] is False else ''}",
            _facts(figure),
        ]
        for figure in shown
    ]
    heads = ["figure", "median", "rounds", "floor or peer", "goal", "also"]
    used = [at for at in range(len(heads)) if any(row[at] for row in rows)]
    yield _table([heads[at] for at in used], [[row[at] for at in used] for row in rows])
    yield from _measured(figures[0], kept)


def _image(name: str, title: str, pictures: Mapping[str, str]) -> Iterator[str]:
    if name in pictures:
        yield f"![{title}]({pictures[name]})"


def _measured(figure: _Figure, kept: Mapping[str, Any]) -> Iterator[str]:
    """Where a figure is from, if not from the run that the head of the page names."""
    measured = figure["measured"]
    peer = measured["options"]["peer"]
    no_peer = f"; RocketMQ {peer}" if figure["group"] == "grpc_send" and peer.startswith("not") else ""
    if measured["at_ms"] != kept["at_ms"] or no_peer:
        yield f"*Measured {_date(measured)}, {_rounds(figure)}{no_peer}.*"


def _rounds(figure: _Figure) -> str:
    rounds = len(figure["rounds"]) or figure["measured"]["options"]["rounds"]
    return f"{rounds} round{'s' if rounds > 1 else ''}"


def _facts(figure: _Figure) -> str:
    """Return the details of a figure that the page shows."""
    details = figure["details"]
    found = [text.format(number(details[name])) for name, text in _DETAILS.items() if name in details]
    found += [text.format(details[name]) for name, text in _SHARES.items() if name in details]
    return ", ".join(found)


def _beside(each: Mapping[str, Any]) -> str:
    return f"{_cell(each['what'])}: {number(each['value'])}"


def _value(figure: _Figure) -> str:
    return number(figure["value"])


def _date(measured: Mapping[str, Any]) -> str:
    at = datetime.fromtimestamp(measured["at_ms"] / 1000, UTC)
    return f"{at:%Y-%m-%d}" + (f", commit `{measured['commit']}`" if measured["commit"] else "")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
