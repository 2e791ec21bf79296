"""Schema of the trail for readers: columns, kinds of events by meaning, kinds of findings and their severity.

Follows docs/reference/trail.md. Kinds that are not named here are kept, counted and reported.
"""

from __future__ import annotations

from typing import Final, TypeAlias

FORMAT = 1
TRAIL_VERSION = 1
LANE = -1
LETTERS = "%DLQ%"


class TrailError(Exception):
    """The trail cannot be audited; the message gives the reason and the place."""


# Columns of a table: name and type, as Spark's DDL has it.
Fields: TypeAlias = tuple[tuple[str, str], ...]

EVENTS: Final[Fields] = (
    ("sequence", "bigint"),
    ("boot", "int"),
    ("kind", "string"),
    ("at_ms", "bigint"),
    ("topic", "string"),
    ("group", "string"),
    ("queue_id", "int"),
    ("queue_offset", "bigint"),
    ("attempt", "int"),
    ("due_ms", "bigint"),
    ("detail", "bigint"),
    ("entry", "bigint"),
    ("message_id", "binary"),
)
# Columns of failures, for the report: files of earlier builds lack the last one.
REASONS: Final[Fields] = (("kind", "string"), ("at_ms", "bigint"), ("group", "string"), ("error", "string"))
# Event with the cell from its path.
ROWS: Final[Fields] = (("cell", "string"), *EVENTS)

ENTRIES: Final[Fields] = (
    ("entry", "bigint"),
    ("kind", "string"),
    ("topic", "string"),
    ("group", "string"),
    ("message_id", "binary"),
    ("due_ms", "bigint"),
    ("attempt", "int"),
    ("accepted_at_ms", "bigint"),
    ("is_stranded", "boolean"),
)
QUEUES: Final[Fields] = (
    ("topic", "string"),
    ("group", "string"),
    ("queue_id", "int"),
    ("first_offset", "bigint"),
    ("end_offset", "bigint"),
)
PROGRESS: Final[Fields] = (
    ("group", "string"),
    ("topic", "string"),
    ("queue_id", "int"),
    ("floor", "bigint"),
    ("done", "array<bigint>"),
    ("hidden", "array<bigint>"),
    ("cursor", "bigint"),
)

# Messages read back from a cluster.
READ_MESSAGES: Final[Fields] = (
    ("topic", "string"),
    ("broker", "string"),
    ("queue_id", "int"),
    ("queue_offset", "bigint"),
    ("message_id", "binary"),
)
READ_QUEUES: Final[Fields] = (
    ("topic", "string"),
    ("broker", "string"),
    ("queue_id", "int"),
    ("from_offset", "bigint"),
    ("to_offset", "bigint"),
    ("end_offset", "bigint"),
    ("since_ms", "bigint"),
    ("why", "string"),
)
READ_CELLS: Final[Fields] = (("cell", "string"), ("sequence", "bigint"))
CLOCKS_MS = 600_000  # largest difference between the clocks of daemons and brokers

# --- kinds of events by meaning ---------------------------------------------------------------------------------------

ACCEPTS = ("SCHEDULED", "QUEUED")
CANCELLED = ("RECALLED", "REPLACED")  # by a user, or because another message has its own key
ENDS_OF_ENTRY = ("DELIVERED", *CANCELLED)
ABSORBED = "ABSORBED"  # a send answered with the pending message of the same own key; nothing was stored
RESCHEDULED = "RESCHEDULED"  # pending until another time
DEAD = (
    *("DEAD_EXHAUSTED", "DEAD_TOO_OLD", "DEAD_TOO_LATE", "DEAD_FORWARDED", "DEAD_SENT_BACK", "DEAD_BY_OPERATOR"),
    "FORWARD_REFUSED",
)
GIVEN_UP = ("TX_GIVEN_UP", "TX_TOO_OLD")  # a transaction that was never decided
LETTER_KINDS = (*DEAD, *GIVEN_UP)  # also fire a dead letter into a dead-letter topic
FIRED = ("QUEUED", "DELIVERED")  # and LETTER_KINDS, in the dead-letter topic
IN_LANE = ("RETRIED", "RETRY_MOVED")
# Accepted for one group, into its lane, or failed by one at a cluster: fired for that group only.
QUEUED_FOR_GROUP = "QUEUED_FOR_GROUP"
FOR_GROUP = (QUEUED_FOR_GROUP, "TAKEN_OVER")
FINISHED = ("ACKED", "FORWARDED")  # by its consumer, or by the cluster that it went to
EXITS = (*FINISHED, "FILTERED", "NACKED")  # and DEAD that name a queue
FAILED = ("NACKED", "POSTPONED")  # and DEAD that name a queue
OF_LETTERS = ("REDRIVEN", "PURGED")
OF_SPOOL = ("SENT", "SEND_FAILED", "SEND_DEAD", "REQUEUED", "DROPPED")
OF_PLACE = ("LEASE_EXPIRED", "GIVEN_BACK", "POSTPONED", "INVISIBLE_CHANGED")
HALF, COMMITTED = "HALF", "COMMITTED"
ENDS_OF_TRANSACTION = (COMMITTED, "ROLLED_BACK", *GIVEN_UP)
OF_TRANSACTION = (HALF, "TX_CHECKED", *ENDS_OF_TRANSACTION)
IN_DOUBT = "FORWARD_IN_DOUBT"
# Kinds that give an entry a number above all before. Not QUEUED: after COMMITTED it has the half message's number.
NUMBERED = ("SCHEDULED", "NACKED", HALF, "SEND_FAILED", "REQUEUED")
AT_BORDER = (IN_DOUBT, "FETCHED")  # in addition to the outcome of the message
OF_SCHEDULES = ("OCCURRED", "SCHEDULE_CHANGED")  # of recurring messages, in addition to the outcome of each
OF_CELL = (
    "OPENED",
    "CLOSED",
    "PROMOTED",
    "HEARTBEAT",
    "TOPIC_CREATED",
    "GROUP_CREATED",
    "GROUP_CHANGED",
    "TOPIC_CHANGED",
    "TOPIC_REMOVED",
    "GROUP_REMOVED",
    "RESET",
    "SUBSCRIBED",
    "OFFSET_SET",
    "GAP",
    "TAIL_LOST",
    "CLOCK_CHANGED",
    "CLOCK_ACCEPTED",
    "OPERATED",
)
# Rare, and needed as rows: always read completely.
READS = ("SUBSCRIBED", "RESET", "TOPIC_REMOVED")  # which group reads which queue, and from which offset
CLOCK_CHANGED = "CLOCK_CHANGED"
TOPIC_CHANGED = "TOPIC_CHANGED"
RARE = ("OPENED", "CLOSED", *READS, "GAP", "TAIL_LOST", CLOCK_CHANGED, TOPIC_CHANGED, "EXPIRED", *OF_LETTERS)
KNOWN = frozenset(
    {
        *ACCEPTS,
        *ENDS_OF_ENTRY,
        RESCHEDULED,
        *DEAD,
        *IN_LANE,
        *FOR_GROUP,
        *EXITS,
        *OF_LETTERS,
        *OF_SPOOL,
        *OF_PLACE,
        *OF_TRANSACTION,
        *AT_BORDER,
        *OF_SCHEDULES,
        *OF_CELL,
        ABSORBED,
        "EXPIRED",
    }
)
# Events that spools do not have.
OF_DAEMON = KNOWN - {
    *("SCHEDULED", *OF_SPOOL),
    *("OPENED", "CLOSED", "PROMOTED", "HEARTBEAT", "GAP", "TAIL_LOST", CLOCK_CHANGED, "CLOCK_ACCEPTED"),
}

# --- findings ---------------------------------------------------------------------------------------------------------

SEVERITY: Final = {
    "FILE_ALTERED": "inconsistent",
    "ILLEGAL": "inconsistent",
    "LEDGER": "inconsistent",
    "ORPHAN": "inconsistent",
    "RECORD_REPEATED": "inconsistent",
    "LOST": "lost",
    "FILE_MISSING": "inconclusive",
    "UNPROVEN": "inconclusive",
    "INCONCLUSIVE": "inconclusive",
    "TRAIL_GAP": "inconclusive",
    "DUPLICATE_ACCEPT": "late",
    "DUPLICATE_DELIVERY": "late",
    "DUPLICATE_EXIT": "late",
    "EARLY": "late",
    "LATE": "late",
    "OVERDUE": "late",
    "PUT_BACK": "notice",
    "RETIRED_CELL": "notice",
    "UNCHAINED": "notice",
    "UNKNOWN_KIND": "notice",
}
EXIT_CODES: Final = {"inconsistent": 40, "lost": 20, "inconclusive": 30, "late": 10, "clean": 0}

# Upper bounds of the bars of the lateness histogram.
BARS_MS: Final = (0, *(step * 10**power for power in range(7) for step in (1, 2, 5)))
