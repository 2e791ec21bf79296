"""Registration of this client at the cluster: an open telemetry stream to each proxy in use, and heartbeats.

A proxy drops a client without a stream, and its receives then fail. A closed stream is reopened by its next use, or
by the next heartbeat.

A proxy renews the leases of a push consumer as long as it sees the client id, for at most three hours. After a kill
of this process its client id stays the same, but the deliveries of the earlier process have no owner. So a session of
a push consumer first sends a termination, and the proxy then releases those leases (RocketMQ 5.5.0: after a second).
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

_SETTINGS_S_MIN = 5.0  # time limit of the answer to settings, if the one of calls is shorter
_GOODBYE_MS = 1_000
_LONG_POLLING_MS = 20_000
_TOPICS_MAX = 256  # a new topic sends the whole list; an evicted topic costs one call

Recover = Callable[[str, wire.RecoverOrphanedTransactionCommand], Awaitable[None]]  # (address of proxy, its command)


class _Stream:
    """Telemetry stream. ``settings`` is done after the first answer of the proxy."""

    def __init__(self, call: Any) -> None:  # noqa: ANN401
        self.call = call
        self.settings: asyncio.Future[wire.Settings] = asyncio.get_running_loop().create_future()
        self.reading: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self.reading is not None and not self.reading.done()


class ProxySession:
    """Session of one client: a producer, or a consumer of one group."""

    def __init__(
        self,
        proxies: Proxies,
        client_id: str,
        client_type: wire.ClientType,
        group: str = "",
        *,
        recover: Recover | None = None,
    ) -> None:
        """Store the parameters.

        ``client_id``: of a push consumer its own id, stable across processes; otherwise an id of this process.
        """
        self.client_id = client_id
        self.group = group
        self.settings: wire.Settings | None = None  # last settings of a proxy
        self._proxies = proxies
        self._type = client_type
        self._recover = recover
        self._topics: dict[str, wire.FilterExpression] = {}
        self._streams: dict[str, _Stream] = {}
        self._opening: dict[str, asyncio.Lock] = {}  # by address: a hanging proxy must not block others

    @property
    def is_unknown(self) -> bool:
        """True if no proxy has accepted this client and no registration is pending."""
        return self.settings is None and not any(each.locked() for each in self._opening.values())

    async def ready(self, proxy: Proxy, topic: str = "", expression: wire.FilterExpression | None = None) -> None:
        """Register this client and its use of ``topic`` at the proxy; return when the proxy has both.

        Raise ``Refused`` (unknown group, missing permission) or ``BrokerUnavailable``.
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
        """Send a heartbeat to every healthy proxy in use, and reopen closed streams. Never raises ``BrokerError``."""
        request = wire.HeartbeatRequest(client_type=self._type)
        if self.group:
            request.group.CopyFrom(resource_of(self.group))
        well = [each for each in map(self._proxies.at, self._streams) if not each.is_isolated]
        await asyncio.gather(*(self._heartbeat(proxy, request) for proxy in well))

    async def _heartbeat(self, proxy: Proxy, request: wire.HeartbeatRequest) -> None:
        with suppress(BrokerError):
            answer = await self._proxies.ask(proxy, "Heartbeat", request, self.client_id)
            if answer.status.code == wire.UNRECOGNIZED_CLIENT_TYPE:  # the proxy has dropped this client
                self.forget(proxy)
            await self.ready(proxy)

    def forget(self, proxy: Proxy) -> None:
        """Close the stream to a proxy that no longer has this client; its next use reopens the stream."""
        if (stream := self._streams.get(proxy.address)) is not None:
            self._end(stream)

    async def close(self) -> None:
        """Send terminations to all proxies in use, and close their streams."""
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
            async with asyncio.timeout(max(_SETTINGS_S_MIN, self._proxies.options.request_timeout_ms / 1000)):
                with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # the reader reports the error
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
                stream.settings.exception()  # marks it as retrieved, in case of no waiter

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
            except Exception as error:  # noqa: BLE001 - the proxy checks again; the stream must stay open
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
