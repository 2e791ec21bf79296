"""Dead letters and jobs in the admin service: what is answered, and what is refused."""

from __future__ import annotations

import pytest
from support.rigs.commands.live_cell import NOW, LiveCell

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Message
from broker_adapter.wire.mapping import encode
from dmq.admin import admin_v1 as wire
from dmq.admin.operations.messages import letters as module
from dmq.admin.requests.mapping import filter_of, wire_filter, wire_job
from retry.dead_letter import DeadFilter, Job, JobKind, JobState
from retry.policy import Reason

FILTER = DeadFilter(
    reasons=frozenset({Reason.EXHAUSTED, Reason.OPERATOR}),
    topics=frozenset({"b", "a"}),
    keys=frozenset({"k"}),
    message_ids=frozenset({"x"}),
    since_ms=NOW,
    until_ms=NOW + 1,
)


def letters(live: LiveCell, **fields: object) -> wire.ListDeadLettersResponse:
    request = wire.ListDeadLettersRequest(**{"group": "billing", "limit": 10} | fields)  # type: ignore[arg-type]
    found: wire.ListDeadLettersResponse = live.ask(request)
    return found


def of_reasons(*numbers: int) -> wire.DeadFilter:
    return wire.DeadFilter(reasons=numbers)  # type: ignore[arg-type]  # also numbers that are no reason


def start(live: LiveCell, **fields: object) -> wire.Job:
    given = {"kind": wire.REDRIVE, "group": "billing", "is_dry_run": True} | fields
    found: wire.Job = live.ask(wire.StartJobRequest(**given)).job  # type: ignore[arg-type]
    return found


def test_a_filter_is_the_same_behind_the_wire() -> None:
    """Every list and both times."""
    assert filter_of(wire.DeadFilter.FromString(wire_filter(FILTER).SerializeToString())) == FILTER
    assert filter_of(wire.DeadFilter()) == DeadFilter()


def test_pages_of_dead_letters_go_on_and_end(live: LiveCell) -> None:
    """From the offset after the last one looked at, to -1; a filter chooses; bodies are there if they are wanted."""
    first = letters(live, limit=3)
    assert ([found.message_id for found in first.letters], first.next_offset) == (["D0", "D1", "D2"], 3)
    rest = letters(live, offset=first.next_offset, with_body=True)
    assert ([found.content.body for found in rest.letters], rest.next_offset) == ([b"body"], -1)
    (found,) = letters(live, filter=wire.DeadFilter(keys=["k2"])).letters
    assert (found.message_id, found.origin_topic, found.reason) == ("D2", "orders", wire.FORWARDED)
    assert not found.content.HasField("body")


def test_bodies_come_in_pages_that_fit_an_answer(live: LiveCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page ends where its bodies get too large, and the next one continues; one letter always fits."""
    payload = encode(Message(topic="orders", message_id="D0", body=b"body", keys=("k0",), properties={"color": "red"}))
    monkeypatch.setattr(module, "BODIES_BYTES_MAX", 3 * len(payload.payload))
    page = letters(live, with_body=True)
    assert (len(page.letters), page.next_offset) == (3, 3)
    monkeypatch.setattr(module, "BODIES_BYTES_MAX", 1)
    page = letters(live, with_body=True, offset=1)
    assert ([found.offset for found in page.letters], page.next_offset) == ([1], 2)
    monkeypatch.setattr(module, "_LETTERS_WITH_BODY_MAX", 2)
    monkeypatch.setattr(module, "BODIES_BYTES_MAX", 2**30)
    assert (len(letters(live, with_body=True).letters), len(letters(live).letters)) == (2, 4)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"group": "a b"}, Rule.GROUP),
        ({"limit": 0}, Rule.REQUEST),
        ({"limit": 1001}, Rule.REQUEST),
        ({"offset": -1}, Rule.REQUEST),
        ({"filter": of_reasons(77)}, Rule.REQUEST),
        ({"filter": wire.DeadFilter(topics=["a b"])}, Rule.TOPIC),
        ({"filter": wire.DeadFilter(keys=["a", " "])}, Rule.KEY),
        ({"filter": wire.DeadFilter(keys=["k" * 16_385])}, Rule.KEY),
        ({"filter": wire.DeadFilter(message_ids=[""])}, Rule.MESSAGE_ID),
        ({"filter": wire.DeadFilter(message_ids=["x"] * 1001)}, Rule.REQUEST),
        ({"filter": wire.DeadFilter(keys=["x"] * 1001)}, Rule.REQUEST),
        ({"filter": wire.DeadFilter(topics=["x"] * 1001)}, Rule.REQUEST),
        ({"filter": of_reasons(*[1] * 1001)}, Rule.REQUEST),
        ({"filter": wire.DeadFilter(since_ms=-1)}, Rule.REQUEST),
        ({"filter": wire.DeadFilter(until_ms=253_402_300_800_000)}, Rule.REQUEST),
        ({"filter": wire.DeadFilter(since_ms=5, until_ms=5)}, Rule.REQUEST),
    ],
)
def test_letters_that_cannot_be_asked_for_are_refused(live: LiveCell, fields: dict[str, object], rule: Rule) -> None:
    """By name, size or time; a job's filter is held to the same."""
    with pytest.raises(Refused) as caught:
        letters(live, **fields)
    assert caught.value.rule is rule
    if "filter" in fields:
        with pytest.raises(Refused):
            start(live, filter=fields["filter"])


def test_the_bounds_themselves_are_allowed(live: LiveCell) -> None:
    """Of sizes, times and rates."""
    for chosen in (
        wire.DeadFilter(keys=["k" * 16_384]),
        wire.DeadFilter(message_ids=["x" * 254] * 1000),
        wire.DeadFilter(since_ms=253_402_300_799_998, until_ms=253_402_300_799_999),
    ):
        assert letters(live, filter=chosen).next_offset == -1
    for rate in (0.0, 0.001, 1_000_000.0):
        assert start(live, rate_per_s=rate).rate_per_s == rate
    assert len(start(live, kind=wire.PURGE, why="x" * 1000).why) == 1000


def test_every_field_of_a_job_reaches_the_wire() -> None:
    """Filter, range, counts and state."""
    job = Job(
        job_id=3,
        kind=JobKind.PURGE,
        group="g",
        filter=FILTER,
        to_topic="t",
        why="w",
        rate_per_s=2.5,
        created_at_ms=4,
        first_offset=5,
        next_offset=6,
        end_offset=7,
        done=8,
        passed=9,
        failed=10,
        state=JobState.STOPPED,
    )
    found = wire_job(job)
    assert (found.job_id, found.kind, found.group, found.state) == (3, wire.PURGE, "g", wire.STOPPED)
    assert (found.to_topic, found.why, found.rate_per_s, found.created_at_ms) == ("t", "w", 2.5, 4)
    assert (found.first_offset, found.next_offset, found.end_offset) == (5, 6, 7)
    assert (found.done, found.passed, found.failed) == (8, 9, 10)
    assert filter_of(found.filter) == FILTER


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"group": ""}, "group is blank"),
        ({"kind": 0}, "unknown kind of job"),
        ({"kind": 9}, "unknown kind of job"),
        ({"to_topic": "a b"}, "topic"),
        ({"why": "because"}, "a purge only"),
        ({"rate_per_s": -1.0}, "a second"),
        ({"rate_per_s": float("nan")}, "a second"),
        ({"rate_per_s": float("inf")}, "a second"),
        ({"rate_per_s": 0.0001}, "a second"),
        ({"kind": wire.PURGE}, "needs a reason"),
        ({"kind": wire.PURGE, "why": " "}, "needs a reason"),
        ({"kind": wire.PURGE, "why": "x" * 1001}, "too long"),
        ({"kind": wire.PURGE, "why": "x", "to_topic": "t"}, "a redrive only"),
        ({"kind": wire.PURGE, "why": "x", "all_groups": True}, "a redrive only"),
        ({"to_topic": "t", "all_groups": True}, "not both"),
    ],
)
def test_a_job_that_cannot_be_is_refused(live: LiveCell, fields: dict[str, object], why: str) -> None:
    """No job is made of it."""
    with pytest.raises(Refused, match=why):
        start(live, is_dry_run=False, **fields)
    assert not live.ask(wire.ListJobsRequest()).jobs


def test_jobs_are_listed_and_stopped(live: LiveCell) -> None:
    """The newest first, of one group or of all; an unknown one is not found."""
    for number in (1, 2):
        assert start(live, is_dry_run=False, rate_per_s=0.001, filter=wire.DeadFilter(keys=["no"])).job_id == number
        assert live.ask(wire.StopJobRequest(job_id=number)).job.job_id == number
    for group, expected in (("", [2, 1]), ("billing", [2, 1]), ("shipping", [])):
        found = live.ask(wire.ListJobsRequest(group=group)).jobs
        assert [job.job_id for job in found] == expected
    for job_id, rule in ((3, Rule.NOT_FOUND), (0, Rule.REQUEST), (-1, Rule.REQUEST)):
        with pytest.raises(Refused) as caught:
            live.ask(wire.StopJobRequest(job_id=job_id))
        assert caught.value.rule is rule
    with pytest.raises(Refused):
        live.ask(wire.ListJobsRequest(group="a b"))
