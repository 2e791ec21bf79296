"""The session table stays bounded and the outbox ends when told."""

from __future__ import annotations

import asyncio

from broker_adapter.runtime.clock import ManualClock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.rocketmq_server.sessions.sessions import IDLE_S_MAX, Sessions, TelemetryOutbox


def seen(sessions: Sessions, client_id: str, group: str = "g") -> None:
    sessions.seen(client_id, wire.PUSH_CONSUMER, group, "JAVA")


def ids(sessions: Sessions) -> list[str]:
    return [session.client_id for session in sessions]


def test_the_longest_unseen_client_gives_way() -> None:
    """At the bound a new client takes the place of the one that was quiet longest."""
    sessions = Sessions(ManualClock(), sessions_max=3)
    for client_id in ("a", "b", "c", "a", "d"):
        seen(sessions, client_id)
    assert ids(sessions) == ["c", "a", "d"]


def test_idle_clients_are_forgotten() -> None:
    """As RocketMQ's proxy does after 120 s."""
    clock = ManualClock()
    sessions = Sessions(clock)
    seen(sessions, "quiet")
    clock.advance(int(IDLE_S_MAX * 1000))
    seen(sessions, "b")
    assert ids(sessions) == ["quiet", "b"]
    clock.advance(1)
    seen(sessions, "c")
    assert ids(sessions) == ["b", "c"]


def test_a_client_with_an_open_stream_is_not_forgotten() -> None:
    """Danger: behind a standstill of two minutes all were, and what changed for them was told to none for five more."""
    clock = ManualClock()
    sessions = Sessions(clock, sessions_max=3)
    outbox = sessions.seen("connected", wire.PUSH_CONSUMER, "g", "JAVA").outbox = TelemetryOutbox()
    clock.advance(int(IDLE_S_MAX * 1000) + 1)
    seen(sessions, "b")
    assert ids(sessions) == ["connected", "b"]
    sessions.detach("connected", outbox)
    seen(sessions, "c")
    assert ids(sessions) == ["b", "c"]
    sessions.seen("b", wire.PUSH_CONSUMER, "g", "JAVA").outbox = TelemetryOutbox()
    for client_id in ("d", "e", "f"):  # at the bound it gives way as all do
        seen(sessions, client_id)
    assert ids(sessions) == ["d", "e", "f"]


def test_earlier_settings_of_a_client_are_kept() -> None:
    """A heartbeat without a group does not take the group away."""
    sessions = Sessions(ManualClock())
    seen(sessions, "a", "g")
    sessions.seen("a", wire.PUSH_CONSUMER, "", "")
    session = sessions.get("a")
    assert session is not None
    assert (session.group, session.language) == ("g", "JAVA")
    sessions.forget("a")
    sessions.forget("a")
    assert len(sessions) == 0


def test_only_the_newest_stream_can_detach_itself() -> None:
    """The end of an old stream must not take the new one from its client."""
    sessions = Sessions(ManualClock())
    old, new = TelemetryOutbox(), TelemetryOutbox()
    sessions.seen("a", wire.PRODUCER, "", "").outbox = new
    sessions.detach("a", old)
    assert [session.outbox for session in sessions] == [new]
    sessions.detach("a", new)
    assert [session.outbox for session in sessions] == [None]
    sessions.detach("gone", new)


def test_closing_ends_a_reader_after_the_queued_frames() -> None:
    """Frames put before the close still arrive, later ones do not."""

    async def scenario() -> list[str]:
        outbox = TelemetryOutbox()
        await outbox.put(wire.TelemetryCommand(status=wire.Status(message="first")))
        outbox.close()
        outbox.close()
        await outbox.put(wire.TelemetryCommand(status=wire.Status(message="late")))
        assert outbox.is_closed
        return [frame.status.message async for frame in outbox]

    assert asyncio.run(scenario()) == ["first"]


def test_closing_a_full_outbox_does_not_wait() -> None:
    """A client that does not read cannot hold up the shutdown; who waits to put is let go."""

    async def scenario() -> int:
        outbox = TelemetryOutbox()
        for _ in range(16):
            await outbox.put(wire.TelemetryCommand())
        outbox.close()
        async with asyncio.timeout(5):
            return len([frame async for frame in outbox])

    assert asyncio.run(scenario()) == 15


def test_an_offer_never_waits() -> None:
    """Taken while there is room; dropped when the client does not read, and when the stream is closed."""
    outbox = TelemetryOutbox()
    assert [outbox.offer(wire.TelemetryCommand()) for _ in range(17)] == [True] * 16 + [False]
    closed = TelemetryOutbox()
    closed.close()
    assert not closed.offer(wire.TelemetryCommand())


def test_settings_of_absurd_length_are_not_kept() -> None:
    """A client could fill the memory with wishes; its stream is kept all the same."""
    sessions, outbox = Sessions(ManualClock()), TelemetryOutbox()
    session = sessions.seen("a", wire.PUSH_CONSUMER, "g", "")
    settings = wire.Settings(client_type=wire.PUSH_CONSUMER, subscription=wire.Subscription())
    sessions.attach(session, settings, outbox)
    assert (session.settings, session.outbox) == (settings, outbox)
    settings.subscription.subscriptions.add(topic=wire.Resource(name="t" * 64 * 1024))
    sessions.attach(session, settings, outbox)
    assert (session.settings, session.outbox) == (None, outbox)


def test_all_settings_together_have_a_bound() -> None:
    """What is beyond it is answered and not kept; a client that goes makes room."""
    sessions = Sessions(ManualClock(), sessions_max=2_000)
    settings = wire.Settings(subscription=wire.Subscription(group=wire.Resource(name="g" * 63 * 1024)))
    everybody = [sessions.seen(f"c-{number}", wire.PUSH_CONSUMER, "g", "") for number in range(1_100)]
    for session in everybody:
        sessions.attach(session, settings, TelemetryOutbox())
        sessions.attach(session, settings, TelemetryOutbox())  # again, in place of the first
    kept = [session.client_id for session in sessions if session.settings is not None]
    assert kept == [f"c-{number}" for number in range(1_040)]
    sessions.forget("c-0")
    sessions.attach(everybody[-1], settings, TelemetryOutbox())
    assert everybody[-1].settings is not None


def test_the_end_of_the_newest_stream_ends_its_wishes() -> None:
    """Without a stream nobody can be told anything; the client says it again on the next one."""
    sessions, outbox = Sessions(ManualClock()), TelemetryOutbox()
    session = sessions.seen("a", wire.PUSH_CONSUMER, "g", "")
    sessions.attach(session, wire.Settings(subscription=wire.Subscription()), outbox)
    sessions.detach("a", outbox)
    assert (session.settings, session.outbox) == (None, None)


def test_words_of_absurd_length_are_cut() -> None:
    """Headers may be tens of kilobytes long, and there may be thousands of clients."""
    session = Sessions(ManualClock()).seen("a", wire.PRODUCER, "", "J" * 30_000, "5" * 30_000)
    assert (len(session.language), len(session.version)) == (64, 64)
