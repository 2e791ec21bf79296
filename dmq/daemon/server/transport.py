"""Choice of the transport of the RocketMQ server, and the services on it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from broker_adapter.contracts.limits import REQUEST_BYTES_MAX
from broker_adapter.runtime.clock import Clock
from dmq.acl.guard import Authenticator
from dmq.acl.quotas import Quotas
from dmq.admin import admin_v1
from dmq.admin.api import AdminService, entrances, methods
from dmq.broker import EmbeddedBroker
from dmq.config.settings import DaemonConfig
from dmq.daemon.server.clients import Clients
from dmq.daemon.server.files import WatchedFiles
from dmq.daemon.server.fronts import front_settings, fronts_of, plain_served_to
from dmq.errors import DmqError
from dmq.http2 import Limits, no_certificate_fault
from dmq.metrics.registry import Metrics
from dmq.metrics.usage import ProcessStatus
from dmq.rocketmq_server.calls.access import Guarded
from dmq.rocketmq_server.calls.dispatch import Dispatcher
from dmq.rocketmq_server.rpc.service import MessagingService
from dmq.rocketmq_server.sessions.sessions import Sessions
from dmq.rocketmq_server.sessions.settings import SidecarConfig
from dmq.rocketmq_server.transport.http2_server import Http2Transport, Port

if TYPE_CHECKING:
    from dmq.cluster import ClusterBroker


class Transport(Protocol):
    """One port with all gRPC services of the daemon."""

    async def start(self) -> int:
        """Listen, serve, and return the port."""
        ...

    async def set_serving(self, *, is_serving: bool) -> None:
        """Set the state of the health service; calls are answered in either state."""
        ...

    def abort(self) -> None:
        """End every call now, with UNAVAILABLE instead of its answer; ``stop`` follows."""
        ...

    async def stop(self, grace_s: float) -> None:
        """End waiting calls, and finish the others in flight within ``grace_s``."""
        ...

    def processes(self) -> Sequence[ProcessStatus]:
        """Return the processes that serve clients, the store process first; safe from any thread."""
        ...


class ServerOptions(NamedTuple):
    """Options of the daemon's process: the number of connections, its version, and the callback for a failure.

    ``sockets`` listen already, if it was a standby.
    """

    connections_max: int
    version: str
    on_failure: Callable[[DmqError], None] = lambda _: None  # clients cannot be served any more
    sockets: Sequence[socket.socket] = ()


def transport_of(
    config: DaemonConfig,
    clock: Clock,
    broker: EmbeddedBroker,
    metrics: Metrics,
    admin: AdminService,
    quotas: Quotas,
    *,
    files: WatchedFiles,
    front: ClusterBroker | None = None,
    options: ServerOptions,
) -> Transport:
    """Return the transport that ``config`` selects, not listening yet. gRPC and the fronts are imported only for use.

    With ``front`` clients use that broker instead of ``broker``.
    """
    settings = SidecarConfig(
        delay_levels_ms=config.delay_levels_ms,
        delay_max_ms=config.delay_max_ms,
        broker_name=config.broker_name,
        receives_waiting_max=config.receives_waiting_max,
        receives_per_client_max=config.receives_per_client_max,
        streams_max=config.streams_max,
        streams_per_client_max=config.streams_per_client_max,
        sessions_max=config.sessions_max,
    )
    sessions = Sessions(clock, sessions_max=config.sessions_max)
    service = _service(broker, front, clock, sessions, settings, quotas=quotas)
    admin.clients.attach(Clients(clock, sessions, service.streams))
    guard = Authenticator(files.keys, clock) if files.keys is not None else None
    dispatcher = Dispatcher(Guarded(service, guard) if guard else service, clock=clock, observer=metrics.calls)
    host, port = config.listen.host, config.listen.port
    if config.transport == "grpcio":
        from dmq.admin.api import grpc_handler
        from dmq.rocketmq_server.transport.grpc_server import GrpcServer

        return GrpcServer(
            service,
            dispatcher,
            host=host,
            port=port,
            handlers=(grpc_handler(admin, guard),),
            reflected=(admin_v1.SERVICE,),
        )
    served = Port(
        service,
        dispatcher,
        methods=methods(admin, guard),
        reflected=(admin_v1.SERVICE,),
        guard=guard,
        entrances=entrances(),
    )
    return _http2(config, clock, served, settings, metrics=metrics, files=files, options=options)


def _http2(
    config: DaemonConfig,
    clock: Clock,
    served: Port,
    settings: SidecarConfig,
    *,
    metrics: Metrics,
    files: WatchedFiles,
    options: ServerOptions,
) -> Transport:
    """Return the server of a port: this process, or front processes."""
    host, port = config.listen.host, config.listen.port
    connections_max, tls = options.connections_max, files.certificates
    count = fronts_of(config.processes, config.held_bytes_max)
    if count:
        from dmq.processes.fronts import Fronts

        own = config, served, settings, clock
        return Fronts(
            served,
            data=config.data.absolute(),
            settings=partial(front_settings, *own, count=count, connections_max=connections_max),
            count=count,
            host=host,
            port_number=port,
            clock=clock,
            calls=metrics.calls,
            version=options.version,
            on_failure=options.on_failure,
            sockets=options.sockets,
        )
    return Http2Transport(
        served,
        host=host,
        port_number=port,
        monotonic_s=clock.monotonic_s,
        limits=limits_of(config, connections_max),
        tls=tls.context if tls is not None else None,
        certificate_fault=tls.fault if tls is not None else no_certificate_fault,
        plain_served_to=plain_served_to(config),
        sockets=options.sockets,
    )


def _service(
    broker: EmbeddedBroker,
    front: ClusterBroker | None,
    clock: Clock,
    sessions: Sessions,
    settings: SidecarConfig,
    *,
    quotas: Quotas,
) -> MessagingService:
    if front is not None:
        service = MessagingService(
            front, clock, sessions, settings, front, quotas=quotas, add_schedule=front.add_schedule
        )
        front.on_group_changed = service.group_changed
    else:
        own = broker, clock, sessions, settings, broker.transactions, broker.pulls
        service = MessagingService(*own, quotas=quotas, add_schedule=broker.schedules.add)
    broker.on_group_changed = service.group_changed
    return service


def limits_of(config: DaemonConfig, connections_max: int) -> Limits:
    """Return the limits of the HTTP/2 server."""
    return Limits(
        request_max=REQUEST_BYTES_MAX,
        connections=connections_max,
        connections_per_address=config.connections_per_address_max,
        idle_s=None if config.connection_idle is None else config.connection_idle.total_seconds(),
        request_s=config.request_time.total_seconds(),
    )
