"""Every delay level, from the wire to the queue and back, on a clock that is told the time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker_adapter.runtime.clock import ManualClock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.broker.broker import EmbeddedBroker
from dmq.rocketmq_server.calls.call import Call
from dmq.rocketmq_server.codec.delay import DELAY_LEVELS_MS_DEFAULT
from dmq.rocketmq_server.rpc.service import MessagingService
from dmq.rocketmq_server.sessions.sessions import Sessions
from dmq.rocketmq_server.sessions.settings import SidecarConfig
from dmq.scheduler.scheduler import Scheduler
from dmq.store.store import Store

pytestmark = pytest.mark.integration
CALL = Call(client_id="levels")


def _send(level: int) -> wire.SendMessageRequest:
    message = wire.Message(topic=wire.Resource(name="levels"), user_properties={"DELAY": str(level)}, body=b"x")
    message.system_properties.message_id = f"01{level:032X}"
    return wire.SendMessageRequest(messages=[message])


async def _received(service: MessagingService) -> list[wire.Message]:
    request = wire.ReceiveMessageRequest(group=wire.Resource(name="g"), batch_size=32)
    request.message_queue.topic.name = "levels"
    request.message_queue.id = -1
    request.invisible_duration.seconds = 30
    request.long_polling_timeout.nanos = 1_000_000
    frames = [frame for piece in await service.messages.receive_message(request, CALL) for frame in piece]
    return [frame.message for frame in frames if frame.HasField("message")]


def test_each_level_is_delivered_at_its_time_and_not_a_millisecond_before(tmp_path: Path) -> None:
    """Levels 1 to 18 wait exactly as long as RocketMQ's table says, and the property is gone on delivery."""
    asyncio.run(_each_level(tmp_path))


async def _each_level(tmp_path: Path) -> None:
    clock = ManualClock()
    store = Store.open(tmp_path, clock)
    broker = EmbeddedBroker(store)
    scheduler = Scheduler(store, broker.placement, broker.checks, on_failure=lambda error: pytest.fail(str(error)))
    service = MessagingService(broker, clock, Sessions(clock), SidecarConfig())
    sent_ms = clock.now_ms()
    for level in range(1, 19):
        answer = await service.messages.send_message(_send(level), CALL)
        assert answer.status.code == wire.OK
    assert len(DELAY_LEVELS_MS_DEFAULT) == 18
    for level, delay_ms in enumerate(DELAY_LEVELS_MS_DEFAULT, start=1):
        clock.step_to(sent_ms + delay_ms - 1)
        assert scheduler.turn().handed_over == 0, f"level {level} was early"
        clock.step_to(sent_ms + delay_ms)
        assert scheduler.turn().handed_over == 1
        (message,) = await _received(service)
        assert message.system_properties.message_id == f"01{level:032X}"
        assert message.system_properties.message_type == wire.DELAY
        assert message.system_properties.delivery_timestamp.ToMilliseconds() == sent_ms + delay_ms
        assert dict(message.user_properties) == {}
    await broker.close()
    store.close()
