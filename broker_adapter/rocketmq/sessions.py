"""Who this client is to the cluster: a telemetry stream to each proxy it uses, kept open, and heartbeats.

A proxy forgets a client whose stream is gone, and its receives then fail. So a stream that ended is opened again, at
once when somebody needs it, and by the next heartbeat otherwise.

What a proxy renews for a push consumer it renews for as long as it sees the client's id, for three hours at most. After
a kill of this process the id is the same and what the last process had received is nobody's. So a session of a push
consumer says goodbye first, which lets the proxy give all that back (RocketMQ 5.5.0: after a second).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc

from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable
from broker_adapter.rocketmq.addresses import endpoints_of
from broker_adapter.rocketmq.codes import check
from broker_adapter.rocketmq.proxies import CLIENT_VERSION, Proxies, Proxy
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import resource_of, set_duration

_SETTINGS_S_MAX = 5.0
_GOODBYE_MS = 1_000
_LONG_POLLING_MS = 20_000
_TOPICS_MAX = 256  # all of them are told with each new one; what is told again costs one call

Recover = Callable[[str, wire.RecoverOrphanedTransactionCommand], Awaitable[None]]  # the proxy's address, what it asks


class _Stream:
    """One telemetry stream. ``settings`` is there once the proxy answered."""

    def __init__(self, call: Any) -> None:  # noqa: ANN401
        self.call = call
        self.settings: asyncio.Future[wire.Settings] = asyncio.get_running_loop().create_future()
        self.reading: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self.reading is not None and not self.reading.done()


class Session:
    """One client: a producer, or a consumer of one group."""

    def __init__(
        self,
        proxies: Proxies,
        client_id: str,
        client_type: wire.ClientType,
        group: str = "",
        *,
        recover: Recover | None = None,
    ) -> None:
        """``client_id``: of a push consumer its own, the same in another process; else of this process alone."""
        self.client_id = client_id
        self.group = group
        self.settings: wire.Settings | None = None  # what a proxy said last
        self._proxies = proxies
        self._type = client_type
        self._recover = recover
        self._topics: dict[str, wire.FilterExpression] = {}
        self._streams: dict[str, _Stream] = {}
        self._opening: dict[str, asyncio.Lock] = {}  # by address: one that hangs keeps nobody from another one

    @property
    def is_unknown(self) -> bool:
        """Whether no proxy ever knew this client, and none is being told of it."""
        return self.settings is None and not any(each.locked() for each in self._opening.values())

    async def ready(self, proxy: Proxy, topic: str = "", expression: wire.FilterExpression | None = None) -> None:
        """Return once the proxy knows this client, and that it has to do with ``topic``.

        Raises ``Refused`` (the group does not exist, the key may not) or ``BrokerUnavailable``.
        """
        stream = self._streams.get(proxy.address)
        is_new = topic and (topic not in self._topics or (expression and self._topics[topic] != expression))
        if stream is not None and stream.is_open and stream.settings.done() and not is_new:
            return
        async with self._opening.setdefault(proxy.address, asyncio.Lock()):
            if topic:
                if topic not in self._topics and len(self._topics) >= _TOPICS_MAX:
                    del self._topics[next(iter(self._topics))]
                self._topics[topic] = expression or wire.FilterExpression(type=wire.TAG, expression="*")
            stream = self._streams.get(proxy.address)
            if stream is None or not stream.is_open:
                self._streams[proxy.address] = stream = await self._open(proxy)
            elif is_new:
                await self._tell(proxy, stream)

    async def heartbeat(self) -> None:
        """Tell every proxy in use that this client lives, and open the streams that ended. Raises nothing."""
        request = wire.HeartbeatRequest(client_type=self._type)
        if self.group:
            request.group.CopyFrom(resource_of(self.group))
        well = [each for each in map(self._proxies.at, self._streams) if not each.is_isolated]
        await asyncio.gather(*(self._heartbeat(proxy, request) for proxy in well))

    async def _heartbeat(self, proxy: Proxy, request: wire.HeartbeatRequest) -> None:
        with suppress(BrokerError):
            answer = await self._proxies.ask(proxy, "Heartbeat", request, self.client_id)
            if answer.status.code == wire.UNRECOGNIZED_CLIENT_TYPE:  # it has forgotten this client
                self.forget(proxy)
            await self.ready(proxy)

    def forget(self, proxy: Proxy) -> None:
        """Have the stream to a proxy opened anew when it is next needed: the proxy does not know this client."""
        if (stream := self._streams.get(proxy.address)) is not None:
            self._end(stream)

    async def close(self) -> None:
        """Say goodbye."""
        for address in list(self._streams):
            proxy = self._proxies.at(address)
            if not proxy.is_isolated:
                with suppress(BrokerError):
                    await self._say_goodbye(proxy, _GOODBYE_MS)
            self._end(self._streams.pop(address))

    async def _say_goodbye(self, proxy: Proxy, timeout_ms: int = 0) -> None:
        request = wire.NotifyClientTerminationRequest()
        if self.group:
            request.group.CopyFrom(resource_of(self.group))
        await self._proxies.ask(proxy, "NotifyClientTermination", request, self.client_id, timeout_ms=timeout_ms)

    @staticmethod
    def _end(stream: _Stream) -> None:
        stream.call.cancel()
        if stream.reading is not None:
            stream.reading.cancel()

    # -- the stream ---------------------------------------------------------------------------------------------------

    async def _open(self, proxy: Proxy) -> _Stream:
        if self._type == wire.PUSH_CONSUMER and proxy.address not in self._streams:
            await self._say_goodbye(proxy)
        call = proxy.call("Telemetry")(metadata=self._proxies.metadata(self.client_id))
        stream = _Stream(call)
        stream.reading = asyncio.ensure_future(self._read(proxy, stream))
        try:
            await self._tell(proxy, stream)
        except BaseException:
            self._end(stream)
            raise
        return stream

    async def _tell(self, proxy: Proxy, stream: _Stream) -> None:
        """Send the settings, and wait for the first answer to them."""
        try:
            async with asyncio.timeout(_SETTINGS_S_MAX):
                with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # the reader tells why the stream ended
                    await stream.call.write(wire.TelemetryCommand(settings=self._wanted(proxy)))
                await asyncio.shield(stream.settings)
        except TimeoutError:
            raise BrokerUnavailable(f"{proxy.address} does not answer the settings of {self.client_id}") from None

    async def _read(self, proxy: Proxy, stream: _Stream) -> None:
        error: BrokerError = BrokerUnavailable(f"{proxy.address} ended the telemetry stream")
        try:
            async for frame in stream.call:
                await self._take(proxy, stream, frame)
        except grpc.aio.AioRpcError as failure:
            error = self._proxies.failed(proxy, failure)
        except BrokerError as failure:
            error = failure
            stream.call.cancel()
        finally:
            if not stream.settings.done():
                stream.settings.set_exception(error)
                stream.settings.exception()  # somebody waits for it, or nobody cares

    async def _take(self, proxy: Proxy, stream: _Stream, frame: wire.TelemetryCommand) -> None:
        command = frame.WhichOneof("command")
        if command == "settings":
            if frame.HasField("status"):
                check(frame.status, proxy.address)
            self.settings = frame.settings
            if not stream.settings.done():
                stream.settings.set_result(frame.settings)
        elif command == "recover_orphaned_transaction_command" and self._recover is not None:
            try:
                await self._recover(proxy.address, frame.recover_orphaned_transaction_command)
            except Exception as error:  # noqa: BLE001 - the proxy asks again; the stream must not end for it
                self._proxies.log("check_failed", address=proxy.address, why=repr(error))
        elif frame.HasField("status"):
            check(frame.status, proxy.address)

    def _wanted(self, proxy: Proxy) -> wire.Settings:
        settings = wire.Settings(client_type=self._type, access_point=endpoints_of(proxy.address))
        set_duration(settings.request_timeout, self._proxies.options.request_timeout_ms)
        settings.user_agent.language = wire.PYTHON
        settings.user_agent.version = CLIENT_VERSION
        settings.user_agent.platform = "Rock-DMQ"
        if self._type == wire.PRODUCER:
            settings.publishing.topics.extend(resource_of(each) for each in self._topics)
            settings.publishing.validate_message_type = True
            return settings
        subscription = settings.subscription
        subscription.group.CopyFrom(resource_of(self.group))
        set_duration(subscription.long_polling_timeout, _LONG_POLLING_MS)
        for topic, expression in self._topics.items():
            subscription.subscriptions.add(topic=resource_of(topic), expression=expression)
        return settings
