"""Who changed what: recorded with key, address and reason, listed, in the trail, and over a kill."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from google.protobuf.message import Message
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import EmbeddedRig, End
from support.rigs.commands.live_cell import LiveCell
from support.rigs.daemon.acl import Key, write_acl
from support.rigs.daemon.process import Daemon, run_command

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import unpack_id
from broker_adapter.runtime.clock import ManualClock
from dmq.admin import admin_v1 as wire
from dmq.admin.api import AdminService
from dmq.admin.api.dispatch import AdminDispatcher
from dmq.admin.client import AdminClient, CallRefused, NotAllowed, NotFound
from dmq.admin.operations.trail import activity as module
from dmq.admin.operations.trail.activity import ActivityLog, AdminCaller, what_of
from dmq.errors import StoreBusy
from dmq.store.backup import back_up
from dmq.store.schema.messages.index import Receipt
from dmq.store.schema.operators.activity import CallOutcome
from dmq.store.store import Store, StoreOptions
from dmq.store.writer.operations import Emit, Op
from dmq.trail.events import EventKind

pytestmark = pytest.mark.integration

BOSS, ON_CALL, VIEWER = Key("boss", "b"), Key("on-call", "o"), Key("viewer", "v")
KEYS = """
[keys.boss]
secret = "b"
role = "admin"
[keys.on-call]
secret = "o"
role = "operator"
topics = { "orders*" = "ADMIN" }
groups = { "billing*" = "ADMIN" }
[keys.viewer]
secret = "v"
role = "viewer"
"""


def a_schedule(name: str, topic: str) -> wire.Schedule:
    return wire.Schedule(name=name, topic=topic, interval_ms=3_600_000, content=wire.Content(body=b"tick"))


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
def test_changes_by_operators_are_recorded(tmp_path: Path, transport: str) -> None:
    """Each changing call once, with key, address, reason and outcome; what is looked at, or not allowed, is not."""
    acl = str(write_acl(tmp_path, KEYS))
    with Daemon(tmp_path / "data", "--acl", acl, env={"DMQ_TRANSPORT": transport}) as daemon:

        def as_(key: Key, why: str = "") -> AdminClient:
            return AdminClient(daemon.address, signer=key.signer(), why=why)

        with as_(BOSS, "neue Bücher") as boss, as_(ON_CALL) as on_call, as_(VIEWER) as viewer:
            boss.create_topic("orders")
            boss.create_topic("prices")
            on_call.set_topic("orders", is_paused=True)
            with pytest.raises(NotAllowed):
                on_call.set_topic("prices", is_paused=True)
            with pytest.raises(NotFound):
                on_call.remove_topic("orders-gone")
            with pytest.raises(CallRefused):
                on_call.create_topic("orders", queues=-1)
            on_call.add_schedule(a_schedule("hourly", "orders"))
            boss.add_schedule(a_schedule("prices", "prices"))
            with pytest.raises(NotAllowed, match="ADMIN on topic 'prices' with the role operator"):
                on_call.pause_schedule("prices")
            taking_over = a_schedule("prices", "orders")
            with pytest.raises(NotAllowed):
                on_call.add_schedule(taking_over, replace=True)
            on_call.pause_schedule("hourly")
            assert [each.name for each in viewer.topics()] == ["orders", "prices"]
            found = list(viewer.activity().activities)
        shown = [(each.key, each.rpc, each.topic, each.outcome) for each in reversed(found)]
        assert shown == [
            ("boss", "CreateTopic", "orders", "done"),
            ("boss", "CreateTopic", "prices", "done"),
            ("on-call", "SetTopic", "orders", "done"),
            ("on-call", "RemoveTopic", "orders-gone", "refused"),
            ("on-call", "CreateTopic", "orders", "refused"),
            ("on-call", "AddSchedule", "orders", "done"),
            ("boss", "AddSchedule", "prices", "done"),
            ("on-call", "PauseSchedule", "orders", "done"),
        ]
        assert {each.address for each in found} == {"loopback"}
        assert found[-1].why == "neue Bücher"
        assert found[-3].what == "is_paused=True"
        signed = ("--address", daemon.address, "--access-key", "on-call")
        env = {"DMQ_SECRET_KEY": "o"}
        done = run_command(*signed, "topic", "resume", "orders", "--why", "disk is new", env=env)
        assert done.returncode == 0, done.stderr
        listed = run_command(*signed, "-o", "json", "activity", "ls", "--key", "on-call", "--limit", "1", env=env)
        assert [(each["rpc"], each["why"]) for each in json.loads(listed.stdout)] == [("SetTopic", "disk is new")]
        assert "disk is new" in run_command(*signed, "activity", "show", "9", env=env).stdout
        assert run_command(*signed, "activity", "show", "10", env=env).returncode == 3
        assert [each["rpc"] for each in daemon.events("activity_recorded")] == [
            *(rpc for _, rpc, *_ in shown),
            "SetTopic",
        ]
        daemon.kill()
        daemon.restart()
        with as_(VIEWER) as viewer:
            assert len(viewer.activity().activities) == 9
        daemon.stop()


def test_a_reading_of_bodies_is_recorded_once_a_minute(live: LiveCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """By caller and subject: pages of one list are one reading, and a list without bodies is none."""
    service = AdminService(live.cell)
    dispatcher = AdminDispatcher(service)

    def read(rpc: str, request: Message) -> None:
        path = wire.METHODS[rpc].path
        live.do(dispatcher.serve(path, request.SerializeToString(), dict[str, str]().get, "loopback"))

    def recorded() -> list[tuple[str, str, str]]:
        return [(each.rpc, each.group, each.outcome) for each in service.activity.newest(since_ms=0, key="", before=0)]

    before = len(recorded())
    for offset, with_body in ((0, False), (0, True), (1, True)):
        request = wire.ListDeadLettersRequest(group="billing", offset=offset, limit=1, with_body=with_body)
        read("ListDeadLetters", request)
    read("GetMessage", wire.GetMessageRequest(topic="orders", message_id="no", with_body=True))
    assert recorded()[: len(recorded()) - before] == [
        ("GetMessage", "", CallOutcome.DONE),
        ("ListDeadLetters", "billing", CallOutcome.DONE),
    ]
    monkeypatch.setattr(module, "READ_AGAIN_S", 0.0)
    read("ListDeadLetters", wire.ListDeadLettersRequest(group="billing", limit=1, with_body=True))
    assert len(recorded()) == before + 3


async def _opened(path: Path, *, on_disk: bool = False) -> EmbeddedRig:
    rig = EmbeddedRig(path, on_disk=on_disk, queues=1)
    await rig.open()
    return rig


def _said(rig: EmbeddedRig) -> list[dict[str, object]]:
    found = [each.event for each in read_outbox(rig.store) if each.event.kind is EventKind.OPERATED]
    return [json.loads(unpack_id(each.message_id)) for each in found]


async def _do_nothing(_: object) -> Message:
    return wire.RemoveTopicResponse()


def test_a_call_that_was_cut_short_is_of_unknown_outcome(tmp_path: Path) -> None:
    """It is on disk before it does anything: a kill leaves it, and the next run says so, once, with one event."""

    async def body() -> None:
        rig = await _opened(tmp_path, on_disk=True)
        began = asyncio.Event()

        async def hang(_: object) -> Message:
            began.set()
            await asyncio.Event().wait()
            raise AssertionError

        task = asyncio.create_task(
            ActivityLog(rig.store).run(AdminCaller("boss", "10.0.0.7", "spring"), "RemoveTopic", _request(), hang)
        )
        await began.wait()
        await rig.restart(End.KILL)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await ActivityLog(rig.store).settle()
        again = ActivityLog(rig.store)
        await again.settle()
        (found,) = again.newest(since_ms=0, key="", before=0)
        assert (found.outcome, found.key, found.why, found.topic) == (CallOutcome.UNKNOWN, "boss", "spring", "orders")
        assert [each["outcome"] for each in _said(rig)] == ["unknown"]
        await rig.close()

    asyncio.run(body())


def test_a_restored_store_explains_its_own_backup(tmp_path: Path) -> None:
    """The backup was taken before its own call ended, so the copy cannot have its outcome."""

    async def body() -> None:
        rig = await _opened(tmp_path, on_disk=True)
        began = asyncio.Event()

        async def hang(_: object) -> Message:
            began.set()
            await asyncio.Event().wait()
            raise AssertionError

        log = ActivityLog(rig.store)
        task = asyncio.create_task(
            log.run(AdminCaller("boss", "10.0.0.7"), "BackUpStore", wire.BackUpStoreRequest(), hang)
        )
        await began.wait()
        await rig.restart(End.KILL)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        again = ActivityLog(rig.store)
        await again.settle()
        (found,) = again.newest(since_ms=0, key="", before=0)
        assert found.error == "the daemon ended before it did, or this store was restored from this backup"
        await rig.close()

    asyncio.run(body())


def test_the_backup_of_a_restored_store_is_done(tmp_path: Path) -> None:
    """The copy has the begun call of its own backup. A restored store shows that the backup is complete."""

    async def body() -> None:
        store = Store.open(tmp_path / "data", clock := ManualClock(1_700_000_000_000), StoreOptions(ballast_bytes=0))
        store.attach(asyncio.get_running_loop(), lambda _: None)

        async def copy(_: object) -> Message:
            back_up(store, tmp_path / "data", tmp_path / "backup")
            return wire.BackUpStoreResponse()

        await ActivityLog(store).run(AdminCaller("boss"), "BackUpStore", wire.BackUpStoreRequest(), copy)
        store.close()
        restored = Store.open(tmp_path / "backup", clock, StoreOptions(ballast_bytes=0))
        restored.attach(asyncio.get_running_loop(), lambda _: None)
        log = ActivityLog(restored)
        await log.settle()
        (found,) = log.newest(since_ms=0, key="", before=0)
        assert (found.outcome, found.error) == (CallOutcome.DONE, "")
        restored.close()

    asyncio.run(body())


def _request() -> wire.RemoveTopicRequest:
    return wire.RemoveTopicRequest(topic="orders", force=True)


def test_its_outcome_is_returned(tmp_path: Path) -> None:
    """Done, refused, failed, or given up by its caller: one event each, and the error goes on to the caller."""

    async def body() -> None:
        rig = await _opened(tmp_path)
        activity = ActivityLog(rig.store)

        async def fail(error: BaseException) -> None:
            async def call(_: object) -> Message:
                raise error

            with pytest.raises(type(error)):
                await activity.run(AdminCaller(), "RemoveTopic", _request(), call)

        await activity.run(AdminCaller(), "RemoveTopic", _request(), _do_nothing)
        await fail(Refused(Rule.REQUEST, "not so"))
        await fail(RuntimeError("a secret perhaps"))
        await fail(asyncio.CancelledError())
        await activity.close()
        assert [each["outcome"] for each in _said(rig)] == ["done", "refused", "failed", "unknown"]
        assert "secret" not in str(_said(rig))
        await rig.close()

    asyncio.run(body())


def test_a_caller_that_goes_while_it_is_recorded_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given up before its start nothing is done; at its end, also while the store is busy, it is recorded as done."""

    async def body() -> None:
        rig = await _opened(tmp_path)
        activity = ActivityLog(rig.store)
        early = asyncio.create_task(activity.run(AdminCaller(), "RemoveTopic", _request(), _do_nothing))
        await asyncio.sleep(0)
        early.cancel()
        await asyncio.gather(early, return_exceptions=True)
        await activity.close()
        late = asyncio.create_task(activity.run(AdminCaller(), "RemoveTopic", _request(), _do_nothing))
        commit, busy = rig.store.commit_async, [StoreBusy("too much waits")]

        def commit_later(ops: Sequence[Op]) -> asyncio.Future[list[Receipt]]:
            if busy and any(isinstance(op, Emit) for op in ops):
                late.cancel()
                raise busy.pop()
            return commit(ops)

        monkeypatch.setattr(rig.store, "commit_async", commit_later)
        (gone,) = await asyncio.gather(late, return_exceptions=True)
        assert isinstance(gone, asyncio.CancelledError)
        await activity.close()
        found = [(each.outcome, each.error) for each in activity.newest(since_ms=0, key="", before=0)]
        assert found == [("done", ""), ("refused", "its caller gave up before it was begun")]
        assert [each["outcome"] for each in _said(rig)] == ["refused", "done"]
        monkeypatch.undo()
        await rig.close()

    asyncio.run(body())


def test_only_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory and in the store; pages go on where the one before ended."""
    monkeypatch.setattr(module, "KEPT", 5)

    async def body() -> None:
        rig = await _opened(tmp_path)
        activity = ActivityLog(rig.store)
        for number in range(9):
            await activity.run(AdminCaller("odd" if number % 2 else "even"), "RemoveTopic", _request(), _do_nothing)
        for each in (activity, ActivityLog(rig.store)):
            assert [found.number for found in each.newest(since_ms=0, key="", before=0)] == [9, 8, 7, 6, 5]
        assert [found.number for found in activity.newest(since_ms=0, key="odd", before=8)] == [6]
        await rig.close()

    asyncio.run(body())


def test_nothing_of_messages_is_in_it() -> None:
    """Bodies, properties, keys and recall handles are counted, long lists and texts are cut."""
    schedule = wire.Schedule(name="hourly", topic="orders", content=wire.Content(body=b"secret", tag="secret"))
    assert what_of(wire.AddScheduleRequest(schedule=schedule, replace=True)) == (
        "schedule=(name=hourly topic=orders content=(...)) replace=True"
    )
    many = wire.ChangeMessagesRequest(topic="orders", message_ids=list("abcde"), cancel=True)
    assert what_of(many) == "message_ids=a,b,c and 2 more cancel=True"
    named = wire.ChangeMessagesRequest(topic="orders", own_keys=["a", "b"], recall_handles=["handle"])
    assert what_of(named) == "recall_handles=(1) own_keys=(2)"
    dead = wire.StartJobRequest(group="billing", filter=wire.DeadFilter(keys=["secret"], topics=["orders"]))
    assert what_of(dead) == "filter=(topics=orders keys=(1))"
    replay = wire.ReplayMessagesRequest(inner_topic="inner", messages=[wire.InnerMessage()] * 3)
    assert what_of(replay) == "inner_topic=inner messages=(3)"
