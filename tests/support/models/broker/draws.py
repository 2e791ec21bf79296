"""Who and what there is in the histories of the broker's state machines, and what may be drawn for their rules."""

from __future__ import annotations

from hypothesis import strategies as st
from support.models.broker.model import Policy

from broker_adapter.contracts.topics import dead_letter_topic
from retry.policy import RetryPolicy, Table

TOPICS, GROUPS = ("orders", "refunds"), ("workers", "auditors")
UNDERTAKERS = tuple(f"undertaker-of-{group}" for group in GROUPS)  # one each: a message may die in both groups
SEXTON, CLIENT = "sexton", "client-1"
FAILING = (*GROUPS, *UNDERTAKERS)  # groups whose messages may die
PAIRS = (
    *((group, topic) for group in GROUPS for topic in TOPICS),
    *((undertaker, dead_letter_topic(group)) for undertaker, group in zip(UNDERTAKERS, GROUPS, strict=True)),
)
LAST_PAIRS = tuple((SEXTON, dead_letter_topic(each)) for each in UNDERTAKERS)  # at the end only, or it would never end
POLICIES = (
    *(Policy(1, (1_000,)), Policy(2, (1,)), Policy(2, (1_000, 5_000))),
    *(Policy(3, (999,)), Policy(3, (1_000, 61_000)), Policy(3, (1, 1_000, 5_000))),
)
FIRST_POLICY, SEXTONS_POLICY = Policy(2, (1_000, 5_000)), Policy(17, (1_000,))
DAY_MS = 86_400_000
NUMBERS = 40
MESSAGE_GROUPS = ("", "", "a", "b")

# None: not delayed. What is sent with a time that has passed is overdue.
delays = st.sampled_from((None, None, 0, -1, -60_000, 1, 2, 50, 999, 1_000, 1_001, 5_000, 61_000, DAY_MS))
durations = st.sampled_from((1, 1_000, 5_000, 30_000, 600_000))
batches = st.sampled_from((1, 2, 3, 6, 1_000))
hows = st.sampled_from(("ack", "fail", "fail", "give up", "send back", "leave"))
steps = (1, 2, 49, 50, 998, 999, 1_000, 1_001, 5_000, 61_000, 600_000)
picks = st.integers(0, 10_000)
pairs = st.sampled_from(PAIRS)
sends = st.lists(st.tuples(st.sampled_from(TOPICS), st.integers(0, NUMBERS), delays), min_size=2, max_size=12)
Sends = list[tuple[str, int, int | None]]


def message_id_of(topic: str, number: int) -> str:
    """No two topics share an id, so that every dead-letter queue has one at most once."""
    return f"{topic}-{number}"


MESSAGE_GROUP_OF = {
    message_id_of(topic, number): MESSAGE_GROUPS[number % len(MESSAGE_GROUPS)]
    for topic in TOPICS
    for number in range(NUMBERS + 1)
}


def a_policy(policy: Policy) -> RetryPolicy:
    """A policy as the broker takes it."""
    return RetryPolicy(backoff=Table(policy.delays_ms), max_attempts=policy.max_attempts)
