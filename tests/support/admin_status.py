"""Status of a cell, as the commands of an operator may find it."""

from __future__ import annotations

from dmq.admin import admin_v1 as wire

NOW = 1_700_000_000_000

STATUS = wire.GetStatusResponse(
    version="1.2.3",
    cell_id="cell-1",
    broker_name="rock-dmq",
    pid=77,
    state=wire.SERVING,
    started_at_ms=NOW - 3_725_000,
    now_ms=NOW,
    listen="127.0.0.1:8081",
    metrics_listen="127.0.0.1:9464",
    data="somewhere/data",
    durability="disk",
    timeline=wire.Timeline(pending=1_000_000, overdue=2, next_due_at_ms=NOW + 5000),
    lateness=wire.Lateness(count=9, p50_ms=0.8, p99_ms=3.25, max_ms=1200.0),
    totals=wire.Totals(accepted=10, delivered=9, acked=8, expired=1),
    commits=wire.Commits(batches=5, ops=50, written_bytes=4096, commit_p99_ms=2.5, sync_p50_ms=0.9, sync_p99_ms=2.25),
    disk=wire.Disk(free_bytes=2**30, low_water_bytes=2**25),
    outbox=wire.Outbox(
        rows=12,
        held_bytes=2048,
        held_bytes_max=2**30,
        trail="somewhere/data/trail",
        exported_sequence=1234,
        lag_ms=42_000,
    ),
    clock=wire.Clock(is_steady=True),
    recovery=wire.Recovery(was_clean=False, cut_bytes=17, open_ms=42.0),
    cluster=wire.Cluster(
        endpoints=("10.0.0.1:8081", "10.0.0.2:8081"),
        away_since_ms=NOW - 5_000,
        proxies=(wire.ProxyTrouble(address="10.0.0.1:8081", why="refused"),),
        waiting=40,
        in_flight=4,
        forwarded=1_000,
        refused=2,
        in_doubt=3,
        kept=36,
        lateness=wire.Lateness(count=900, p50_ms=2.0, p99_ms=9.0, max_ms=21.0),
        lanes=(wire.LaneTrouble(topic="orders", waiting=40, why="no answer"),),
        inner=wire.Inner(topic="dmq_inner_topic", fetched=7, unreadable=1, error="away"),
    ),
    processes=(
        wire.Process(
            name="store",
            state="serving",
            starts=1,
            pid=77,
            connections=1,
            streams=20,
            cpu_s=61.0,
            memory_bytes=80 * 2**20,
        ),
    ),
    backups=wire.PeriodicBackups(
        folder="/backup",
        rule="every 6h",
        kept_max=7,
        last_at_ms=NOW - 7_200_000,
        last_folder="/backup/dmq-1",
        last_bytes=2**30,
        next_at_ms=NOW + 600_000,
        failed_at_ms=NOW - 1_000,
        error="no room",
    ),
)
