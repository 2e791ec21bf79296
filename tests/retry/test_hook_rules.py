"""Rules of the producer hook against plain models: breaker, outage, ramp, ids, and the kept form of calls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retry.hook.destinations.breaker import FAILURES_TO_OPEN, PROBE_STEPS_S, PROBE_TIMEOUT_S, Breaker, BreakerState
from retry.hook.destinations.outage import OutageRule
from retry.hook.destinations.ramp import BURST_S, LEAST_PER_S, START_PER_S, UNLIMITED_PER_S, Ramp
from retry.hook.producers.codecs import PlainCodec
from retry.hook.sending.uid import UidSource, time_of
from retry.hook.verdicts.verdict import Unreadable

pytestmark = pytest.mark.property
waits_s = st.floats(0, 40, allow_nan=False)
uids = st.integers(0, 7).map(lambda number: bytes([number]))
breaker_steps = st.lists(
    st.tuples(waits_s, st.sampled_from(["failure", "success", "probe", "probe_failed", "void", "outage"]), uids),
    max_size=60,
)


@given(breaker_steps)
def test_the_breaker_is_its_model(steps: list[tuple[float, str, bytes]]) -> None:
    """Whatever happens in whatever order: open after five different failures in a row, one probe a step at most."""
    breaker, now_s = Breaker(), 0.0
    state, row, step, next_s = "closed", [b""][:0], 0, 0.0  # the model
    for wait_s, what, uid in steps:
        now_s += wait_s
        if what == "success":
            assert breaker.on_success() == (state != "closed")
            state, row, step = "closed", [], 0
        elif what in {"failure", "outage"}:
            if what == "failure":
                opened = breaker.on_failure(uid, now_s)
            else:
                breaker.open(now_s)
                opened = state == "closed"
            opens = False
            if state == "closed":
                row = sorted({*row, uid})
                opens = what == "outage" or len(row) == FAILURES_TO_OPEN
            if opens:
                state, row, step, next_s = "open", [], 0, now_s + PROBE_STEPS_S[0]
            assert opened == opens
        elif what == "probe":
            may = state != "closed" and now_s >= next_s
            assert breaker.may_probe(now_s) == may
            assert breaker.begin_probe(now_s) == may
            state, next_s = ("probing", now_s + PROBE_TIMEOUT_S) if may else (state, next_s)
        elif what == "probe_failed":
            breaker.on_probe_failed(now_s)
            if state == "probing":
                step = min(step + 1, len(PROBE_STEPS_S) - 1)
                state, next_s = "open", now_s + PROBE_STEPS_S[step]
        else:
            breaker.on_probe_void(now_s)
            if state == "probing":
                state, next_s = "open", now_s
        assert breaker.state.value == state
        assert breaker.is_calm == (state == "closed" and not row)
        if state != "closed":
            assert breaker.next_probe_s == next_s


@given(st.lists(st.one_of(st.none(), st.tuples(waits_s, st.sampled_from("AB"), uids)), max_size=80))
def test_an_outage_is_many_different_messages_that_fail_alike(events: list[tuple[float, str, bytes] | None]) -> None:
    """The rule against a list of everything that happened; ``None`` is a success."""
    rule, now_s = OutageRule(messages=4, window_s=60.0), 0.0
    failed: list[tuple[float, str, bytes]] = []
    for event in events:
        if event is None:
            rule.clear()
            failed = []
            assert rule.is_calm
            continue
        wait_s, kind, uid = event
        now_s += wait_s
        failed.append((now_s, kind, uid))
        alike = {one_uid for at_s, one_kind, one_uid in failed if one_kind == kind and at_s > now_s - 60.0}
        assert rule.on_failure(kind, uid, now_s) == (len(alike) >= 4)


@given(st.lists(st.text(max_size=2), max_size=200))
def test_classes_without_end_take_no_memory_without_end(kinds: list[str]) -> None:
    """It remembers a bounded number of classes, and still sees an outage of one that goes on."""
    rule = OutageRule(messages=2, classes=3)
    for number, kind in enumerate(kinds):
        rule.on_failure(kind, number.to_bytes(4, "big"), 0.0)
        assert len(rule._failed) <= 3
    rule.on_failure("one", b"a", 0.0)
    assert rule.on_failure("one", b"b", 0.0)


@given(
    st.none() | st.floats(0.5, 5_000),
    st.lists(st.tuples(st.floats(0, 3), st.sampled_from(["success", "failure", "spend"])), max_size=60),
)
def test_the_ramp_doubles_by_the_second_and_halves_on_failure(
    limit: float | None, steps: list[tuple[float, str]]
) -> None:
    """Never above the limit or below the least, doubled at most once a second, halved at each failure."""
    ramp, now_s = Ramp(limit), 0.0
    ramp.start(now_s)
    model: float | None = START_PER_S if limit is None else min(START_PER_S, limit)
    quiet_s = 0.0
    for wait_s, what in steps:
        now_s += wait_s
        if what == "success":
            ramp.on_success(now_s)
            if model is not None and now_s >= quiet_s + 1 and model != limit:
                model, quiet_s = model * 2, now_s
        elif what == "failure":
            ramp.on_failure(now_s)
            if model is not None:
                model, quiet_s = max(LEAST_PER_S, model / 2), now_s
        else:
            ramp.spend(now_s)
        if model is not None and limit is not None:
            model = min(model, limit)
        if model is not None and limit is None and model >= UNLIMITED_PER_S:
            model = None
        assert ramp.rate_per_s == model
        assert ramp.wait_s(now_s) >= 0


@given(st.integers(1, 400), st.integers(20, 200))
def test_the_ramp_admits_its_rate(rate: int, turns: int) -> None:
    """Senders that wait as told start no more than the rate allows, but for the burst."""
    ramp, now_s = Ramp(float(rate)), 0.0
    for started in range(1, turns + 1):
        now_s += ramp.wait_s(now_s)
        assert ramp.wait_s(now_s) < 1e-9
        ramp.spend(now_s)
        assert started <= now_s * rate + BURST_S * rate + 1 + 1e-6


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=300))
def test_later_ids_are_greater_through_clock_steps(moves_ms: list[int]) -> None:
    """Sorted and unique although the clock stands still or goes back; version and variant are those of UUID 7."""
    source, now_ms = UidSource(), 1_700_000_000_000
    made: list[bytes] = []
    for move_ms in moves_ms:
        now_ms += move_ms
        made.append(source.make(now_ms))
    assert made == sorted(set(made))
    assert all(len(uid) == 16 and uid[6] >> 4 == 7 and uid[8] >> 6 == 0b10 for uid in made)
    assert time_of(made[0]) == 1_700_000_000_000 + moves_ms[0]


def test_a_child_makes_other_ids_than_its_parent() -> None:
    """Two sources with the same past go different ways after a fork."""
    source = UidSource()
    source.make(1)
    source.after_fork()
    assert source.make(1) != UidSource().make(1)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from(["$b", "$d", "$"])
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$b", "$d", "$x", "a", ""]) | st.text("ab$", max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(st.lists(plain, max_size=3), st.dictionaries(st.text("abc", min_size=1, max_size=3), plain, max_size=3))
def test_plain_arguments_come_back_as_they_were(args: list[Any], kwargs: dict[str, Any]) -> None:
    """Also bytes, and dicts whose keys look like our marks."""
    codec = PlainCodec()
    arguments = codec.decode(b"", codec.encode(b"", tuple(args), kwargs).payload)
    assert (list(arguments.args), arguments.kwargs) == (args, kwargs)


@given(st.binary(max_size=40) | st.sampled_from([b"{}", b"[]", b'{"v":2,"a":[],"k":{}}', b'{"v":1,"a":3,"k":{}}']))
def test_other_bytes_are_unreadable_and_nothing_else(payload: bytes) -> None:
    """So that an entry of a future version goes to the dead set with its bytes, and the drain goes on."""
    try:
        PlainCodec().decode(b"", payload)
    except Unreadable:
        return
    raise AssertionError("these bytes were taken for a call")


def test_probes_come_after_1_2_5_10_and_then_every_30_seconds() -> None:
    """Each failing probe waits for the next step; the last one stays."""
    breaker, now_s = Breaker(), 0.0
    breaker.open(now_s)
    waited_s: list[float] = []
    for _ in range(7):
        waited_s.append(breaker.next_probe_s - now_s)
        now_s = breaker.next_probe_s
        assert not breaker.begin_probe(now_s - 0.001)
        assert breaker.begin_probe(now_s)
        assert not breaker.begin_probe(now_s)
        breaker.on_probe_failed(now_s)
    assert waited_s == [1, 2, 5, 10, 30, 30, 30]


def test_states_of_a_breaker_have_the_names_users_see() -> None:
    """They are labels of metrics and logs."""
    assert [state.value for state in BreakerState] == ["closed", "open", "probing"]
