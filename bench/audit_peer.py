"""The peer of the Spark audit: its main questions to the same files as SQL in DuckDB, in a process of its own.

``python -m bench.audit_peer TRAIL`` prints what it found as one line of JSON. It is the bound that one machine sets:
no incremental runs, no histories, no proof from snapshots, and no cluster.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import duckdb

THREADS, MEMORY = 2, "6GB"
_FIRED = "kind IN ('QUEUED', 'DELIVERED')"
_QUESTIONS = {
    "gaps": "SELECT count(*) FROM (SELECT cell FROM events GROUP BY cell "
    "HAVING max(sequence) - min(sequence) + 1 <> count(DISTINCT sequence))",
    "open": "SELECT count(*) FROM (FROM events WHERE kind = 'SCHEDULED') AS a ANTI JOIN "
    "(FROM events WHERE kind IN ('DELIVERED', 'RECALLED')) AS b USING (cell, entry)",
    "lost": "SELECT count(*) FROM (FROM events WHERE kind = 'SCHEDULED') AS a ANTI JOIN "
    "(FROM events WHERE kind IN ('DELIVERED', 'RECALLED')) AS b USING (cell, entry) "
    "ANTI JOIN waiting USING (cell, entry)",
    "accepted_twice": "SELECT count(*) FROM (SELECT topic, message_id FROM events "
    "WHERE kind IN ('SCHEDULED', 'QUEUED') GROUP BY ALL HAVING count(*) > 1)",
    "delivered_twice": "SELECT count(*) FROM (SELECT cell, entry FROM events "
    "WHERE kind = 'DELIVERED' GROUP BY ALL HAVING count(*) > 1)",
    "unfinished": f'SELECT count(*) FROM (SELECT topic, message_id FROM events WHERE {_FIRED} OR "group" IS NOT NULL '
    f"AND message_id IS NOT NULL GROUP BY ALL HAVING count(*) FILTER ({_FIRED} OR kind IN ('RETRIED', 'RETRY_MOVED')) "
    "<> count(*) FILTER (kind IN ('ACKED', 'NACKED', 'FILTERED') OR kind LIKE 'DEAD_%' AND queue_id IS NOT NULL))",
    "scheduled": "SELECT count(*) FROM (SELECT due_ms // 600000 AS due, topic, count(*) FILTER (kind = 'SCHEDULED'), "
    "count(*) FILTER (kind = 'DELIVERED'), count(*) FILTER (kind = 'RECALLED'), max(at_ms - due_ms), "
    "quantile_cont(at_ms - due_ms, [0.5, 0.9, 0.99, 0.999]) FILTER (kind = 'DELIVERED') "
    "FROM events WHERE kind IN ('SCHEDULED', 'DELIVERED', 'RECALLED') GROUP BY ALL)",
    "groups": 'SELECT count(*) FROM (SELECT topic, "group", kind, attempt, count(*) FROM events '
    'WHERE "group" IS NOT NULL GROUP BY ALL)',
}


def ask(trail: Path) -> dict[str, int]:
    """Return the answers, by name."""
    with duckdb.connect(config={"threads": THREADS, "memory_limit": MEMORY}) as database:
        for name, where in (("events", "events/*/*/*/*.parquet"), ("waiting", "snapshots/*/*/entries.parquet")):
            files = str(trail / where).replace("'", "''")
            query = f"CREATE VIEW {name} AS FROM read_parquet('{files}', hive_partitioning = true)"
            database.execute(query)
        found = {}
        for name, question in _QUESTIONS.items():
            row = database.execute(question).fetchone()
            assert row is not None
            found[name] = int(row[0])
        return found


if __name__ == "__main__":
    print(json.dumps(ask(Path(sys.argv[1]))))
