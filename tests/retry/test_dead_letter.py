"""Which dead letters a filter means, and that a job outlives a restart as what it was."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dmq.store.schema.operators.orders import decode_job, encode_job
from retry.dead_letter import Dead, DeadFilter, Job, JobKind, JobState
from retry.policy import Reason

NOW = 1_700_000_000_000
DEAD = Dead(
    offset=7,
    message_id="m1",
    origin_topic="orders",
    reason=Reason.EXHAUSTED,
    attempts=17,
    first_failed_at_ms=NOW - 1000,
    last_failed_at_ms=NOW,
    tag="vip",
    keys=("k1", "k2"),
)
JOB = Job(
    job_id=3,
    kind=JobKind.REDRIVE,
    group="billing",
    filter=DeadFilter(
        reasons=frozenset({Reason.TOO_OLD, Reason.EXHAUSTED}),
        topics=frozenset({"b", "a"}),
        keys=frozenset({"ключ"}),
        message_ids=frozenset({"m1"}),
        since_ms=5,
        until_ms=NOW,
    ),
    to_topic="orders2",
    why="fixed",
    rate_per_s=2.5,
    created_at_ms=NOW,
    first_offset=10,
    next_offset=15,
    end_offset=20,
    done=2,
    passed=2,
    failed=1,
    state=JobState.STOPPED,
)


@pytest.mark.parametrize(
    ("chosen", "is_meant"),
    [
        (DeadFilter(), True),
        (DeadFilter(reasons=frozenset({Reason.EXHAUSTED, Reason.TOO_OLD})), True),
        (DeadFilter(reasons=frozenset({Reason.FORWARDED})), False),
        (DeadFilter(topics=frozenset({"orders", "others"})), True),
        (DeadFilter(topics=frozenset({"others"})), False),
        (DeadFilter(keys=frozenset({"k2", "k3"})), True),
        (DeadFilter(keys=frozenset({"k3"})), False),
        (DeadFilter(message_ids=frozenset({"m1", "m2"})), True),
        (DeadFilter(message_ids=frozenset({"m2"})), False),
        (DeadFilter(since_ms=NOW), True),
        (DeadFilter(since_ms=NOW + 1), False),
        (DeadFilter(until_ms=NOW + 1), True),
        (DeadFilter(until_ms=NOW), False),
        (DeadFilter(since_ms=NOW, until_ms=NOW + 1, topics=frozenset({"orders"}), keys=frozenset({"k1"})), True),
        (DeadFilter(topics=frozenset({"orders"}), keys=frozenset({"k3"})), False),
    ],
)
def test_a_filter_matches_all_its_parts(chosen: DeadFilter, is_meant: bool) -> None:
    """One of the values of each part that is given; since is included, until is not."""
    assert chosen.matches(DEAD) is is_meant


def test_a_message_that_was_sent_to_a_dead_letter_queue_has_no_reason() -> None:
    """It is meant by a filter without reasons, and by one that says so."""
    sent = Dead(offset=1, message_id="m")
    assert DeadFilter().matches(sent)
    assert DeadFilter(reasons=frozenset({None, Reason.EXHAUSTED})).matches(sent)
    assert not DeadFilter(reasons=frozenset({None})).matches(DEAD)
    assert not DeadFilter(reasons=frozenset(Reason)).matches(sent)


@pytest.mark.parametrize(
    "job",
    [
        JOB,
        Job(job_id=0, kind=JobKind.PURGE, group="g"),
        replace(JOB, rate_per_s=3),
        replace(JOB, filter=DeadFilter(reasons=frozenset({None, Reason.OPERATOR}))),
        replace(JOB, state=JobState.DONE, kind=JobKind.PURGE, filter=DeadFilter()),
    ],
)
def test_a_job_is_read_as_it_was_written(job: Job) -> None:
    """Every field, with the types of the original; equal jobs are equal bytes."""
    read = decode_job(encode_job(job))
    assert read == job
    assert (type(read.kind), type(read.state)) == (JobKind, JobState)
    assert {type(reason) for reason in read.filter.reasons if reason} <= {Reason}
    assert encode_job(read) == encode_job(job)


def test_the_stored_form_of_a_job() -> None:
    """Its names are a promise to stores written before."""
    assert json.loads(encode_job(JOB)) == {
        "job_id": 3,
        "kind": "redrive",
        "group": "billing",
        "filter": {
            "reasons": [1, 2],
            "topics": ["a", "b"],
            "keys": ["ключ"],
            "message_ids": ["m1"],
            "since_ms": 5,
            "until_ms": NOW,
        },
        "to_topic": "orders2",
        "all_groups": False,
        "why": "fixed",
        "rate_per_s": 2.5,
        "created_at_ms": NOW,
        "first_offset": 10,
        "next_offset": 15,
        "end_offset": 20,
        "done": 2,
        "passed": 2,
        "failed": 1,
        "state": "stopped",
    }


def test_a_job_from_an_older_version_continues_as_it_was_started() -> None:
    """A redrive to everybody; a purge has no such thing."""
    for kind, to_all in ((JobKind.REDRIVE, True), (JobKind.PURGE, False)):
        plain = json.loads(encode_job(replace(JOB, kind=kind)))
        del plain["all_groups"]
        assert decode_job(json.dumps(plain).encode()).all_groups is to_all
    assert decode_job(encode_job(replace(JOB, all_groups=True))).all_groups


@pytest.mark.parametrize("value", [b"", b"\xff", b"{", b"null", b"5", b'"x"', b"[]", b"{}", b'{"filter":{}}'])
def test_an_invalid_job_is_refused(value: bytes) -> None:
    """As a ValueError, whatever it is instead."""
    with pytest.raises(ValueError, match="a job cannot be read"):
        decode_job(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("job_id", "3"),
        ("job_id", True),
        ("job_id", 3.0),
        ("kind", "destroy"),
        ("kind", None),
        ("group", None),
        ("group", 5),
        ("to_topic", []),
        ("why", {}),
        ("rate_per_s", "2.5"),
        ("rate_per_s", False),
        ("next_offset", None),
        ("done", "1"),
        ("state", "sleeping"),
        ("filter", None),
        ("filter", []),
    ],
)
def test_a_job_with_a_wrong_value_is_refused(name: str, value: object) -> None:
    """Wherever it is; a field that is missing altogether as well."""
    plain: dict[str, object] = json.loads(encode_job(JOB))
    with pytest.raises(ValueError, match="a job cannot be read"):
        decode_job(json.dumps(plain | {name: value}).encode())
    del plain[name]
    with pytest.raises(ValueError, match=f"a job cannot be read: .*{name}"):
        decode_job(json.dumps(plain).encode())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reasons", [99]),
        ("reasons", ["EXHAUSTED"]),
        ("reasons", [[]]),
        ("reasons", 1),
        ("topics", "orders"),
        ("topics", ["a", 1]),
        ("keys", {"a": 1}),
        ("message_ids", [["m1"]]),
        ("since_ms", "5"),
        ("until_ms", None),
    ],
)
def test_a_filter_with_a_wrong_value_is_refused(name: str, value: object) -> None:
    """A text where a list is meant would otherwise choose by its letters."""
    plain = json.loads(encode_job(JOB))
    plain["filter"][name] = value
    with pytest.raises(ValueError, match="a job cannot be read"):
        decode_job(json.dumps(plain).encode())


def test_a_job_advances_and_is_done_at_its_end() -> None:
    """Counts add up, the rest stays; a batch may end beyond the end."""
    running = replace(JOB, state=JobState.RUNNING)
    further = running.advanced(19, done=3, passed=1)
    assert further == replace(running, next_offset=19, done=5, passed=3)
    assert running.advanced(15) == running
    for end in (20, 25):
        ended = further.advanced(end, failed=1)
        assert ended == replace(further, next_offset=end, failed=2, state=JobState.DONE)


def test_a_stopped_job_stays_stopped() -> None:
    """A batch that was under way when an operator stopped it still counts."""
    assert JOB.advanced(20, done=5) == replace(JOB, next_offset=20, done=7, state=JobState.STOPPED)


def test_a_job_never_goes_back() -> None:
    """It would do some of its work twice."""
    with pytest.raises(AssertionError, match="once"):
        JOB.advanced(14)
