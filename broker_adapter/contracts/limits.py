"""Limits of the public protocol, with the unit in each name and the source in a comment.

Sources: defaults of the Apache RocketMQ 5.x proxy and broker, verified on a running 5.5.0 where possible. Our own
limits are marked "ours". Relations between limits are asserted at import.
"""

from __future__ import annotations

# -- names ------------------------------------------------------------------------------------------------------------
TOPIC_CHARS_MAX = 127
GROUP_CHARS_MAX = 120
DERIVED_NAME_CHARS_MAX = 255  # %RETRY%<group>, %DLQ%<group>, %RETRY%<group>_<topic>

# -- one message ------------------------------------------------------------------------------------------------------
BODY_BYTES_MAX = 4 * 1024 * 1024  # exactly 4 MiB is accepted, one byte more is not
USER_PROPERTIES_MAX = 128
PROPERTIES_BYTES_MAX = 16 * 1024  # user properties, tag and keys together; each alone may reach the limit
MESSAGE_GROUP_BYTES_MAX = 63  # the server refuses 64
OWN_KEY_BYTES_MAX = 128  # ours: own key of a delayed message, see DMQ_KEY
MESSAGE_ID_BYTES_MAX = 254  # ours: the packed id, one byte longer, has a one-byte length in the store

# -- one call ---------------------------------------------------------------------------------------------------------
REQUEST_BYTES_MAX = 64 * 1024 * 1024  # ours; Apache's proxy accepts 130 MiB
MESSAGES_PER_SEND_MAX = 1024  # ours: one call is one atomic batch, which must stay small
RECEIVE_BATCH_MAX = 32
ENTRIES_PER_ACK_MAX = 1024  # ours
ENDPOINTS_BYTES_MAX = 1024  # ours: our address as a client gives it; a route repeats it for each queue

# -- time -------------------------------------------------------------------------------------------------------------
DELIVER_AT_MS_MAX = 253_402_300_799_999  # 9999-12-31T23:59:59.999Z, the last instant a protobuf Timestamp can carry
INVISIBLE_MS_MIN_RECEIVE = 10_000
INVISIBLE_MS_MAX = 12 * 3600 * 1000
POLLING_MS_MIN = 5_000
POLLING_MS_MAX = 20_000
AUTO_RENEW_INVISIBLE_MS = 60_000
AUTO_RENEW_MS_MAX = 3 * 3600 * 1000

# RocketMQ's delay levels 1 to 18 (messageDelayLevel, default since 3.x; the same in 5.5.0):
# 1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h
DELAY_LEVELS_MS = tuple(
    seconds * 1000
    for seconds in (1, 5, 10, 30, *(60 * minutes for minutes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 60, 120)))
)
# A consumer's 16 retries: level 3 + failed attempts, so 10s 30s 1m ... 2h (RocketMQ 4.9 send-back default).
RETRY_STEPS_MS = DELAY_LEVELS_MS[2:]

# -- a cell (ours) ----------------------------------------------------------------------------------------------------
TOPICS_MAX = 10_000
GROUPS_MAX = 10_000
SUBSCRIPTIONS_MAX = 20_000  # pairs of group and topic in use in one run: each is kept in memory
QUEUES_PER_TOPIC_DEFAULT = 8
QUEUES_PER_TOPIC_MAX = 1024

assert GROUP_CHARS_MAX + len("%RETRY%") <= DERIVED_NAME_CHARS_MAX
assert GROUP_CHARS_MAX + len("%RETRY%") + 1 + TOPIC_CHARS_MAX <= DERIVED_NAME_CHARS_MAX
assert BODY_BYTES_MAX + PROPERTIES_BYTES_MAX < 8 * 1024 * 1024 <= REQUEST_BYTES_MAX
assert MESSAGE_GROUP_BYTES_MAX < 256 and MESSAGE_ID_BYTES_MAX + 1 < 256 and OWN_KEY_BYTES_MAX < 256
assert PROPERTIES_BYTES_MAX < 2**16, "a tag has a two-byte length in the store"
assert POLLING_MS_MIN < INVISIBLE_MS_MIN_RECEIVE < AUTO_RENEW_INVISIBLE_MS < AUTO_RENEW_MS_MAX <= INVISIBLE_MS_MAX
assert QUEUES_PER_TOPIC_DEFAULT <= QUEUES_PER_TOPIC_MAX < 2**16
