"""Names of types: what was kept under an earlier one is sent, in its order, and default names outlive upgrades."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.rigs.producer.hook import AWAY, EXACT, fill, until
from support.rigs.producer.spool import QUIET, an_entry

from broker_adapter.queue_client.blocking import BlockingProducer
from broker_adapter.queue_client.producer import Producer
from broker_adapter.runtime.clock import ManualClock
from dmq.producer_store.spool import Spool
from retry import Death, DelaySink, HandlerExists, Redelivery, SinkUnavailable, Spooled, durable
from retry.testing import FakeProducer, MemorySink, advance, run_due


def make(sink: DelaySink, script: list[Any] | None = None) -> tuple[Redelivery, FakeProducer]:
    """A hook without threads whose handler was renamed from ``old`` to ``new``."""
    producer = FakeProducer(script or [])
    hook = Redelivery(sink, autostart=False, policy=EXACT)
    hook.add_handler("new", producer.send, earlier_names=("old",))
    return hook, producer


def test_messages_kept_under_an_earlier_name_are_sent(tmp_path: Path) -> None:
    """In a spool as on disk: by the handler of today, from the dead set too, and it counts as claimed."""
    with Spool(tmp_path, options=QUIET) as spool:
        spool.put(an_entry(1, type_name="old", payload=b"1")).result()
        held = spool.put(an_entry(2, type_name="old", payload=b"2"), is_held=True).result()
        assert held is not None
        spool.bury(held, Death.PERMANENT, "no").result()
    with Spool(tmp_path, options=QUIET) as spool:
        hook, producer = make(spool)
        assert hook.metrics().unclaimed == 0
        (dead,) = hook.dead("new")
        assert dead.entry.payload == b"2"
        assert hook.requeue("new", [dead.entry.uid]) == 1
        hook.start()
        until(lambda: sorted(producer.sent) == [b"1", b"2"])
        hook.close()


def test_a_key_keeps_its_order_over_a_change_of_names() -> None:
    """While entries of a key wait under the earlier name, later ones go behind them there; then the new one is used."""
    clock = ManualClock()
    sink = MemorySink(clock)
    fill(sink, 2, key="k", type_name="old")
    hook, producer = make(sink, [AWAY])
    assert run_due(hook) == 1
    outcome = hook.send("new", b"behind", key="k")
    assert isinstance(outcome, Spooled)
    assert [entry.type_name for entry in sink.entries] == ["old"] * 3
    assert hook.send("new", b"other", key="l") is not None
    advance(hook, clock, 4_000)
    assert producer.sent == [b"other", b"\x01", b"\x02", b"behind"]
    producer._script.append(AWAY)
    hook.send("new", b"last", key="k")
    assert [entry.type_name for entry in sink.entries] == ["new"]


def test_a_sink_that_takes_every_key_gets_it_under_the_new_name() -> None:
    """It says of every key that something waits: an earlier name would be used for ever."""
    sink = MemorySink(ManualClock(), can_hold=False)
    fill(sink, 1, key="k", type_name="old")
    hook, producer = make(sink)
    hook.send("new", b"2", key="k")
    assert run_due(hook) == 1
    assert producer.sent == [b"2", b"\x01"]


def test_threads_start_for_messages_under_an_earlier_name() -> None:
    """As they do for what waits under the handler's own."""
    sink = MemorySink()
    fill(sink, 3, type_name="old")
    producer = FakeProducer()
    with Redelivery(sink) as hook:
        hook.add_handler("new", producer.send, earlier_names=["old", "older", "new"])
        until(lambda: len(producer.sent) == 3)


def test_a_sink_that_cannot_name_its_types_delays_nothing() -> None:
    """What waits under the handler's own name is sent meanwhile, and the others are asked for again."""
    sink = MemorySink()
    sink.fail("types", SinkUnavailable("away"))
    producer = FakeProducer()
    with Redelivery(sink, autostart=False) as hook:
        hook.add_handler("new", producer.send, earlier_names=["old"], workers=1)
        fill(sink, 1, type_name="new")
        hook.start()
        until(lambda: len(producer.sent) == 1)
        until(lambda: sink.types == [])


def test_a_name_has_one_handler() -> None:
    """Also an earlier one, whichever is registered first."""
    hook, _ = make(MemorySink(ManualClock()))
    with pytest.raises(HandlerExists, match="'old' is an earlier name of 'new'"):
        hook.add_handler("old", print)
    with pytest.raises(HandlerExists, match="'new' has a handler already"):
        hook.add_handler("newer", print, earlier_names=("new",))
    with pytest.raises(ValueError, match="cannot name a type"):
        hook.add_handler("x", print, earlier_names=("no good",))
    assert hook.check().settings["handler new"]["earlier_names"] == ["old"]  # type: ignore[index]


def _name_of(producer: object) -> tuple[str, tuple[str, ...]]:
    hook = Redelivery(MemorySink(ManualClock()), autostart=False)
    durable(producer, hook)
    (handler,) = hook._handlers.values()
    return handler.type_name, handler.earlier_names


def test_the_names_of_known_producers_contain_no_modules() -> None:
    """Those of earlier builds, which did, are known."""
    name, earlier = _name_of(object.__new__(Producer))
    assert name == "broker_adapter-Producer-send"
    assert "broker_adapter-producer-producer-Producer-send" in earlier
    name, earlier = _name_of(object.__new__(BlockingProducer))
    assert name == "broker_adapter-BlockingProducer-send"
    assert "broker_adapter-blocking-BlockingProducer-send" in earlier


def test_a_library_may_move_its_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is that of the place from which it is imported; an earlier build named the module behind that."""

    def package(inner: str, *, is_public: bool) -> object:
        client = type("Client", (FakeProducer,), {"__module__": f"library.{inner}", "__qualname__": "Client"})
        top = ModuleType("library")
        if is_public:
            top.Client = client  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "library", top)
        return client()

    assert _name_of(package("v1.client", is_public=True)) == ("library-Client-send", ("library-v1-client-Client-send",))
    assert _name_of(package("v2", is_public=True))[0] == "library-Client-send"
    assert _name_of(package("v2", is_public=False)) == ("library-v2-Client-send", ())
