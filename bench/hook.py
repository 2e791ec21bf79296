"""The library hook and its spool: sends, keeping, opening, draining; beside the floor and beside persist-queue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench import child
from bench.figures import Beside, Figure, Goal
from bench.place import directory
from bench.plan import Plan

SEND_US, SPOOLED_PER_S, OPEN_S, OPEN_MB = 20, 20_000, 1.0, 150
SENDERS, SPOOLERS, WORKERS = (1, 16), (1, 16, 64), (2, 8)
_GOAL_SPOOLERS = 16
_RAMPED_WORKERS = WORKERS[0]
_PEER_DUES = 2_000  # a get walks over all that was acknowledged: 20 000 take it minutes
# What each of persist-queue's queues syncs, as strace shows it.
_ACK_QUEUE = "SQLiteAckQueue (WAL journal, synchronous=FULL: a commit and one fdatasync a put)"
_PEERS = {
    "ack_queue": _ACK_QUEUE,
    "sqlite_queue": "SQLiteQueue (auto_commit, WAL journal, synchronous=FULL: a commit and one fdatasync a put)",
    "file_queue": "file Queue (one fsync in 100 puts, none of its index: survives SIGKILL, not power loss)",
    "file_queue_synced": "file Queue, chunksize=1 (one fsync a put, none of its index: may lose what it synced)",
}
_ENDS = {"closed": "a clean close", "killed": "SIGKILL right after the last put"}

_Run = dict[str, Any]
_Found = defaultdict[tuple[str, int | str], list[_Run]]


def measure(plan: Plan) -> list[Figure]:
    """Return what ``Redelivery`` costs while the broker is up, keeps while it is away, and drains once it is back."""
    sends, dues = plan.pick(full=200_000, quick=2_000), plan.pick(full=20_000, quick=500)
    ramped = plan.pick(full=20_000, quick=100)
    found: _Found = defaultdict(list)
    plan.expect(plan.rounds * (len(SENDERS) + 4 * len(SPOOLERS) + 2 * len(WORKERS) + 1))
    for _ in range(plan.rounds):
        for threads in SENDERS:
            plan.step(f"{sends} sends, {threads} threads, broker up")
            found["send", threads].append(_run("hook_send", sends, threads=threads))
        for threads in SPOOLERS:
            _floor_and_peer(plan, found, threads)
            count = _spooled(plan, threads)
            plan.step(f"{count} sends, {threads} threads, broker away")
            found["spool", threads].append(_run("hook_spool", count, threads=threads))
        for workers in WORKERS:
            plan.step(f"drain {dues}, {workers} workers")
            found["drain", workers].append(_run("hook_drain", dues, workers=workers, is_ramped=0))
            plan.step(f"drain {_PEER_DUES}, {workers} workers, persist-queue")
            found["peer_drain", workers].append(_run("peer_drain", _PEER_DUES, workers=workers))
        plan.step(f"drain {ramped}, {_RAMPED_WORKERS} workers, with the ramp")
        found["ramped", _RAMPED_WORKERS].append(_run("hook_drain", ramped, workers=_RAMPED_WORKERS, is_ramped=1))
    return [
        *(_send(found["send", threads], threads) for threads in SENDERS),
        *(
            figure
            for threads in SPOOLERS
            for figure in _kept(
                "hook.spooling",
                f"sends from {threads} threads while the broker refuses, each until its message is durable",
                found,
                "spool",
                threads,
                goal=Goal(sign=">=", bound=SPOOLED_PER_S) if threads == _GOAL_SPOOLERS else None,
            )
        ),
        *_drains(found, dues, ramped),
    ]


def measure_spool(plan: Plan) -> list[Figure]:
    """Return what ``Spool.put`` keeps, and what opening a full spool takes."""
    found: _Found = defaultdict(list)
    others = [kind for kind in _PEERS if kind != "ack_queue"]
    plan.expect(1 + plan.rounds * ((4 + len(others)) * len(SPOOLERS) + 2 * len(_ENDS) + 1))
    with directory() as peer_data:
        plan.step(f"fill persist-queue with {plan.spooled}")
        child.run("peer_fill", peer_data, plan.spooled)
        for _ in range(plan.rounds):
            for threads in SPOOLERS:
                _floor_and_peer(plan, found, threads)
                for kind in others:
                    _peer(plan, found, threads, kind)
                count = _spooled(plan, threads)
                plan.step(f"{count} puts, {threads} threads")
                found["put", threads].append(_run("spool_put", count, threads=threads))
            for end in _ENDS:
                found["open", end].append(_opened(plan, end))
            plan.step("open persist-queue")
            found["peer_open", "ack_queue"].append(child.run("peer_open", peer_data, plan.spooled))
    return [
        *(
            figure
            for threads in SPOOLERS
            for figure in _kept(
                "spool.put",
                f"Spool.put from {threads} threads, each until its entry is durable",
                found,
                "put",
                threads,
                peers=list(_PEERS),
            )
        ),
        *(
            figure
            for end in _ENDS
            for figure in _openings(end, plan.spooled, found["open", end], found["peer_open", "ack_queue"])
        ),
    ]


# -- runs -------------------------------------------------------------------------------------------------------------


def _run(action: str, count: int, **options: int | str) -> _Run:
    with directory() as data:
        return child.run(action, data, count, **options)


def _spooled(plan: Plan, threads: int) -> int:
    """Return how many messages to keep: alone each waits for a sync of its own."""
    return plan.pick(full=4_000 if threads == 1 else 40_000, quick=400)


def _floor_and_peer(plan: Plan, found: _Found, threads: int) -> None:
    count = _spooled(plan, threads)
    plan.step(f"{count} rows, raw RocksDB, {threads} to a sync")
    found["raw", threads].append(_run("raw_spool", count, batch=threads))
    plan.step(f"{count} bare hand-offs, {threads} threads")
    found["hand_off", threads].append(_run("hand_off", count, threads=threads))
    _peer(plan, found, threads, "ack_queue")


def _peer(plan: Plan, found: _Found, threads: int, kind: str) -> None:
    count = plan.pick(full=4_000, quick=200)  # none of them gains anything by more threads, or by more messages
    plan.step(f"{count} puts, {threads} threads, persist-queue {kind}")
    found[kind, threads].append(_run("peer_put", count, threads=threads, kind=kind))


def _opened(plan: Plan, end: str) -> _Run:
    with directory() as data:
        plan.step(f"fill with {plan.spooled}, then {_ENDS[end]}")
        filled = _fill(data, plan.spooled, is_killed=end == "killed")
        plan.step(f"open after {_ENDS[end]}")
        opened = child.run("spool_open", data, plan.spooled)
    if opened["was_closed"] != (end == "closed"):
        raise RuntimeError(f"the spool does not say that its last run ended with {_ENDS[end]}")
    return opened | {"filled_per_s": filled["per_s"]}


def _fill(data: Path, count: int, *, is_killed: bool) -> _Run:
    filler = child.Child("spool_fill", data, count)
    try:
        full = next(iter(filler.said()), None)
    finally:
        filler.end(is_killed=is_killed)
    if full is None or (filler.process.returncode and not is_killed):
        raise RuntimeError(f"the process that fills the spool failed with {filler.process.returncode}")
    return full


# -- figures ----------------------------------------------------------------------------------------------------------


def _values(rounds: Sequence[_Run], key: str) -> list[float]:
    return [float(each[key]) for each in rounds]


def _medians(rounds: Sequence[_Run], *names: str) -> dict[str, object]:
    return {name: median(_values(rounds, name)) for name in names}


def _send(rounds: list[_Run], threads: int) -> Figure:
    return Figure(
        name=f"hook.send.{threads}",
        what=f"Redelivery.send (on_failure, no key) over the bare call of a handler that does nothing, {threads} "
        "threads that do nothing else: wall time by the calls of all threads",
        unit="us/send",
        rounds=_values(rounds, "added_us"),
        goal=Goal(sign="<=", bound=SEND_US),
        beside=Beside(what="the bare call", rounds=_values(rounds, "bare_us")),
        details=_medians(rounds, "hooked_us", "worst_block_us"),
    )


def _kept(
    name: str,
    what: str,
    found: _Found,
    kind: str,
    threads: int,
    *,
    goal: Goal | None = None,
    peers: Sequence[str] = ("ack_queue",),
) -> list[Figure]:
    ours, raw = found[kind, threads], found["raw", threads]
    per_s = _values(ours, "per_s")

    def latencies(rounds: list[_Run]) -> dict[str, object]:
        return {f"{q}_ms": median(float(each["latency_ms"][q]) for each in rounds) for q in ("p50", "p99", "max")}

    floor = Figure(
        name=f"{name}.{threads}",
        what=f"{what}; 200 bytes",
        unit="messages/s",
        rounds=per_s,
        goal=goal,
        beside=Beside(what=f"raw rocksdict, the row only, {threads} to a sync", rounds=_values(raw, "per_s")),
        details={
            **_medians(ours, "cpu_us", "sync_us"),
            "per_batch": median(1 / batches for batches in _values(ours, "batches")),
            "row_bytes": raw[-1]["row_bytes"],
            **latencies(ours),
        },
    )
    bare = found["hand_off", threads]
    return [
        floor,
        Figure(
            name=f"{name}.{threads}.to_hand_off",
            what=f"the same beside {threads} threads of Python whose bytes one thread appends to a file and syncs",
            unit="messages/s",
            rounds=per_s,
            beside=Beside(what="hand-off and fdatasync, nothing kept in order", rounds=_values(bare, "per_s")),
            details=_medians(bare, "cpu_us") | latencies(bare),
        ),
        *(
            Figure(
                name=f"{name}.{threads}.to_{peer}",
                what=f"the same beside persist-queue's {_PEERS[peer]}, put from {threads} threads",
                unit="messages/s",
                rounds=per_s,
                beside=Beside(what=f"persist-queue {peer}", rounds=_values(found[peer, threads], "per_s")),
                details=_medians(found[peer, threads], "cpu_us") | latencies(found[peer, threads]),
            )
            for peer in peers
        ),
    ]


def _drains(found: _Found, dues: int, ramped: int) -> list[Figure]:
    def figure(name: str, what: str, rounds: list[_Run], beside: Beside) -> Figure:
        return Figure(
            name=name,
            what=f"{what}, a handler that does nothing, from the start until the last one is forgotten",
            unit="entries/s",
            rounds=_values(rounds, "per_s"),
            beside=beside,
            details=_medians(rounds, "handled_per_s", "cpu_us", "per_batch", "repeated"),
        )

    return [
        *(
            figure(
                f"hook.drain.{workers}",
                f"drain of {dues} due entries, {workers} workers, without the ramp",
                found["drain", workers],
                Beside(
                    what=f"persist-queue ack_queue, get + ack of {_PEER_DUES}, {workers} threads",
                    rounds=_values(found["peer_drain", workers], "per_s"),
                ),
            )
            for workers in WORKERS
        ),
        figure(
            f"hook.drain.{_RAMPED_WORKERS}.ramped",
            f"drain of {ramped} due entries, {_RAMPED_WORKERS} workers, as it is without a setting: 50/s, and each "
            "second twice as fast",
            found["ramped", _RAMPED_WORKERS],
            Beside(what="without the ramp", rounds=_values(found["drain", _RAMPED_WORKERS], "per_s")),
        ),
    ]


def _openings(end: str, count: int, ours: list[_Run], peers: list[_Run]) -> list[Figure]:
    what = f"opening a spool of {count} due entries after {_ENDS[end]}, its files in the page cache"

    def figure(name: str, key: str, text: str, unit: str, goal: Goal, *, details: dict[str, object]) -> Figure:
        return Figure(
            name=f"spool.open.{end}.{name}",
            what=f"{what}: {text}",
            unit=unit,
            rounds=_values(ours, key),
            goal=goal,
            beside=Beside(what="persist-queue ack_queue, as many rows", rounds=_values(peers, key)),
            details=details,
        )

    in_time = Goal(sign="<=", bound=OPEN_S)
    return [
        figure("ready", "ready_s", "until Spool() returns", "s", in_time, details=_medians(ours, "store_s")),
        figure("first", "first_s", "until a due entry is taken", "s", in_time, details=_medians(ours, "filled_per_s")),
        figure(
            "memory",
            "peak_mb",
            "growth of the resident memory, its peak until 2 s later",
            "MB",
            Goal(sign="<=", bound=OPEN_MB),
            details=_medians(ours, "rss_mb", "process_mb"),
        ),
    ]
