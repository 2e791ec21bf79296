"""Blocking variant of ``connect`` for programs without an event loop: the loop runs in a thread.

with connect("rocketmq-remoting://127.0.0.1:9876") as broker:
    producer = broker.producer("orders-producer")
    producer.send(Message("orders", b"..."), delay_level=3)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from broker_adapter.contracts.classic import Decision, Filter, QueueReceipt
from broker_adapter.contracts.errors import BrokerAway
from broker_adapter.contracts.message import Message
from broker_adapter.queue_client import client as asynchronous
from broker_adapter.queue_client.client import RunningConsumer
from broker_adapter.queue_client.consumer import ConsumerOptions, Handler
from broker_adapter.queue_client.producer import Producer, TransactionReceipt

_T = TypeVar("_T")
_CONSUMER = ConsumerOptions()


class BlockingProducer:
    """Blocking ``Producer``. Safe to use from many threads. Raises the errors of ``Producer``."""

    def __init__(self, producer: Producer, wait: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._producer = producer
        self._wait = wait

    @property
    def left_alone(self) -> Mapping[str, int]:
        """Blocking variant of ``Producer.left_alone``."""

        async def asked() -> Mapping[str, int]:
            return self._producer.left_alone

        found: Mapping[str, int] = self._wait(asked())
        return found

    def send(self, message: Message, **how: Any) -> QueueReceipt:  # noqa: ANN401 - those of Producer.send
        """Blocking variant of ``Producer.send``."""
        receipt: QueueReceipt = self._wait(self._producer.send(message, **how))
        return receipt

    def send_one_way(self, message: Message, **how: Any) -> None:  # noqa: ANN401 - those of Producer.send_one_way
        """Blocking variant of ``Producer.send_one_way``."""
        self._wait(self._producer.send_one_way(message, **how))

    def send_batch(self, messages: Sequence[Message], **how: Any) -> QueueReceipt:  # noqa: ANN401 - as above
        """Blocking variant of ``Producer.send_batch``."""
        receipt: QueueReceipt = self._wait(self._producer.send_batch(messages, **how))
        return receipt

    def send_in_transaction(self, message: Message, execute: Callable[[Message], Decision]) -> TransactionReceipt:
        """Blocking variant of ``Producer.send_in_transaction``; ``execute`` runs in a separate thread."""

        async def in_thread(half: Message) -> Decision:
            return await asyncio.to_thread(execute, half)

        receipt: TransactionReceipt = self._wait(self._producer.send_in_transaction(message, in_thread))
        return receipt

    def recall(self, topic: str, recall_handle: str) -> str:
        """Blocking variant of ``Producer.recall``."""
        message_id: str = self._wait(self._producer.recall(topic, recall_handle))
        return message_id


class BlockingClient:
    """Blocking ``Client`` with an event loop in its own thread. Call ``close``, or use it as a context manager."""

    def __init__(self, address: str, **how: Any) -> None:  # noqa: ANN401 - those of connect
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="broker-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._wait(asynchronous.connect(address, **how))
        except BaseException:
            self._end()
            raise

    def producer(self, group: str, **how: Any) -> BlockingProducer:  # noqa: ANN401 - those of Client.producer
        """Blocking variant of ``Client.producer``."""
        return BlockingProducer(self._wait(self._client.producer(group, **how)), self._wait)

    def consumer(
        self, group: str, topics: Mapping[str, str | Filter], options: ConsumerOptions = _CONSUMER
    ) -> Callable[[Handler], RunningConsumer]:
        """Blocking variant of ``Client.consumer``. A plain function runs in threads, up to ``handlers_max`` at once."""

        def begin(handler: Handler) -> RunningConsumer:
            async def on_loop() -> RunningConsumer:
                return self._client.consumer(group, topics, options)(handler)

            return self._wait(on_loop())

        return begin

    def close(self) -> None:
        """Close consumers, producers and connections, then end the thread."""
        if self._thread.is_alive():
            self._wait(self._client.close())
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("a blocking call in a coroutine of the client would never end; await connect() there")
        if not self._thread.is_alive():
            coroutine.close()
            raise BrokerAway("the client is closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def connect(address: str, **how: Any) -> BlockingClient:  # noqa: ANN401 - those of broker_adapter.connect.connect
    """Return a blocking client of the cluster at ``address``; parameters as ``broker_adapter.connect``."""
    return BlockingClient(address, **how)
