"""Dead letters and jobs in the admin service: what reaches the wire, what reaches the source, what neither."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest
from support.admin_source import DAMAGED, LETTERS, MESSAGE, MINUTE, FixedSource, letter, service_over
from support.admin_status import NOW

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.wire.mapping import encode
from dmq.admin import admin_v1 as wire
from dmq.admin.api import service as module
from dmq.admin.requests.mapping import filter_of, wire_filter, wire_job
from dmq.admin.requests.status import DeadPage
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


@dataclass
class Spy(FixedSource):
    """Remembers what the source was asked for."""

    asked: list[object] = field(default_factory=list)

    async def dead_letters(
        self, group: str, chosen: DeadFilter, *, offset: int, limit: int, with_outcome: bool
    ) -> DeadPage:
        self.asked.append((group, chosen, offset, limit, with_outcome))
        return await super().dead_letters(group, chosen, offset=offset, limit=limit, with_outcome=with_outcome)

    async def start_job(self, job: Job, *, is_dry_run: bool) -> Job:
        self.asked.append((job, is_dry_run))
        return await super().start_job(job, is_dry_run=is_dry_run)


def letters(source: FixedSource | None = None, **fields: object) -> wire.ListDeadLettersResponse:
    request = wire.ListDeadLettersRequest(**{"group": "billing", "limit": 10} | fields)  # type: ignore[arg-type]
    return asyncio.run(service_over(source or FixedSource()).list_dead_letters(request))


def of_reasons(*numbers: int) -> wire.DeadFilter:
    return wire.DeadFilter(reasons=numbers)  # type: ignore[arg-type]  # also numbers that are no reason


def start(source: FixedSource | None = None, **fields: object) -> wire.Job:
    given = {"kind": wire.REDRIVE, "group": "billing"} | fields
    request = wire.StartJobRequest(**given)  # type: ignore[arg-type]
    return asyncio.run(service_over(source or FixedSource()).start_job(request)).job


def test_a_filter_is_the_same_behind_the_wire() -> None:
    """Every list and both times."""
    assert filter_of(wire.DeadFilter.FromString(wire_filter(FILTER).SerializeToString())) == FILTER
    assert filter_of(wire.DeadFilter()) == DeadFilter()


def test_every_field_of_a_dead_letter_reaches_the_wire() -> None:
    """Its facts, its outcome, and its message without the body."""
    found = letters(with_outcome=True).letters[2]
    assert (found.offset, found.message_id, found.origin_topic, found.reason) == (6, "D6", "orders", wire.EXHAUSTED)
    assert (found.attempts, found.tag, list(found.keys)) == (17, "new", ["k1", "k6"])
    assert (found.first_failed_at_ms, found.last_failed_at_ms) == (NOW - 60 * MINUTE, NOW + 6 * MINUTE)
    assert (found.dead_at_ms, found.outcome_at_ms) == (NOW + 6 * MINUTE + 1, NOW + 99 * MINUTE)
    assert (found.outcome, found.outcome_note) == ("redriven", "orders R1")
    assert (found.content.message_group, found.content.body_bytes) == ("g", len(MESSAGE.body))
    assert not found.content.HasField("body")


def test_a_letter_that_was_sent_there_has_no_reason() -> None:
    """Somebody sent it to the dead-letter queue, nothing failed."""
    assert letters().letters[-1].reason == wire.SENT_HERE


def test_what_is_asked_for_reaches_the_source() -> None:
    """Filter, place, number and outcomes; an absent filter means all."""
    source = Spy()
    letters(source, filter=wire_filter(FILTER), offset=5, limit=7, with_outcome=True)
    letters(source)
    assert source.asked == [("billing", FILTER, 5, 7, True), ("billing", DeadFilter(), 0, 10, False)]


def test_pages_of_dead_letters_go_on_and_end() -> None:
    """From the offset after the last one looked at, to -1."""
    first = letters(limit=2)
    assert ([found.offset for found in first.letters], first.next_offset) == ([4, 5], 6)
    rest = letters(offset=6)
    assert ([found.offset for found in rest.letters], rest.next_offset) == ([8], -1)


def test_a_damaged_letter_does_not_hide_the_others() -> None:
    """It is listed with what is known of it, without a content."""
    source = FixedSource(letters=[replace(LETTERS[0], payload=DAMAGED), LETTERS[1]])
    found = letters(source).letters
    assert [(each.message_id, each.HasField("content")) for each in found] == [("D4", False), ("D5", True)]


def test_bodies_come_in_pages_that_fit_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is cut where its bodies get too large, and goes on with the letter that was cut; one always fits."""
    payload = encode(replace(MESSAGE, body=b"x" * 1000)).payload
    source = FixedSource(letters=[replace(letter(offset), payload=payload) for offset in (1, 2, 5)])
    monkeypatch.setattr(module, "BODIES_BYTES_MAX", 2 * len(payload))
    page = letters(source, with_body=True)
    assert ([found.offset for found in page.letters], page.next_offset) == ([1, 2], 5)
    assert {found.content.body for found in page.letters} == {b"x" * 1000}
    assert len(letters(source).letters) == 3
    monkeypatch.setattr(module, "BODIES_BYTES_MAX", 1)
    page = letters(source, with_body=True)
    assert ([found.offset for found in page.letters], page.next_offset) == ([1], 2)


def test_few_letters_are_read_where_bodies_are_wanted() -> None:
    """A thousand bodies would be 4 GiB in the daemon."""
    source = Spy()
    letters(source, limit=1000, with_body=True)
    letters(source, limit=1000)
    assert [asked[3] for asked in source.asked if isinstance(asked, tuple)] == [100, 1000]


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
def test_letters_that_cannot_be_asked_for_are_refused(fields: dict[str, object], rule: Rule) -> None:
    """By name, size or time; a job's filter is held to the same."""
    with pytest.raises(Refused) as caught:
        letters(None, **fields)
    assert caught.value.rule is rule
    if "filter" in fields:
        with pytest.raises(Refused):
            start(filter=fields["filter"])


def test_the_bounds_themselves_are_allowed() -> None:
    """Of sizes, times and rates."""
    for chosen in (
        wire.DeadFilter(keys=["k" * 16_384]),
        wire.DeadFilter(message_ids=["x" * 254] * 1000),
        wire.DeadFilter(since_ms=253_402_300_799_998, until_ms=253_402_300_799_999),
    ):
        assert letters(filter=chosen).next_offset == -1
    for rate in (0.0, 0.001, 1_000_000.0):
        assert start(rate_per_s=rate, is_dry_run=True).rate_per_s == rate
    assert len(start(kind=wire.PURGE, why="x" * 1000).why) == 1000


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


def test_a_job_is_asked_for_as_it_was_meant() -> None:
    """Nothing that only its keeper can know is in it."""
    source = Spy()
    start(source, filter=wire_filter(FILTER), to_topic="there", rate_per_s=0.5, is_dry_run=True)
    start(source, kind=wire.PURGE, why="too old")
    redrive = Job(job_id=0, kind=JobKind.REDRIVE, group="billing", filter=FILTER, to_topic="there", rate_per_s=0.5)
    purge = Job(job_id=0, kind=JobKind.PURGE, group="billing", why="too old")
    assert source.asked == [(redrive, True), (purge, False)]


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
def test_a_job_that_cannot_be_is_refused(fields: dict[str, object], why: str) -> None:
    """Before the source hears of it."""
    source = Spy()
    with pytest.raises(Refused, match=why):
        start(source, **fields)
    assert source.asked == []


def test_jobs_are_listed_and_stopped() -> None:
    """The newest first, of one group or of all; an unknown one is not found."""
    source = FixedSource()
    service = service_over(source)
    assert start(source).job_id == 1
    assert asyncio.run(service.stop_job(wire.StopJobRequest(job_id=1))).job.state == wire.STOPPED
    start(source)
    for group, expected in (("", [2, 1]), ("billing", [2, 1]), ("shipping", [])):
        found = asyncio.run(service.list_jobs(wire.ListJobsRequest(group=group))).jobs
        assert [job.job_id for job in found] == expected
    with pytest.raises(Refused) as caught:
        asyncio.run(service.stop_job(wire.StopJobRequest(job_id=3)))
    assert caught.value.rule is Rule.NOT_FOUND


@pytest.mark.parametrize("job_id", [0, -1])
def test_a_number_that_is_no_job_is_refused(job_id: int) -> None:
    """A dry run has no number, and nothing to stop."""
    with pytest.raises(Refused, match="begin at 1"):
        asyncio.run(service_over(FixedSource()).stop_job(wire.StopJobRequest(job_id=job_id)))


def test_jobs_of_a_name_that_is_none_are_refused() -> None:
    """Only an empty one means all."""
    with pytest.raises(Refused):
        asyncio.run(service_over(FixedSource()).list_jobs(wire.ListJobsRequest(group="a b")))
