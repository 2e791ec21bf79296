"""Number of front processes of a daemon, and the settings of each."""

from __future__ import annotations

from typing import Final, Literal

from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.config.settings import DaemonConfig, fronts_max
from dmq.daemon.files import certificate_files
from dmq.daemon.processors import processors
from dmq.http2 import Bidirectional, Method, PlainServedTo, Streaming
from dmq.processes.clocks import wall_less_boot_ms
from dmq.processes.settings import RelayedMethod, Settings, TlsFiles
from dmq.rocketmq_server.sessions.settings import SidecarConfig
from dmq.rocketmq_server.transport.http2_server import Port

FRONTS_MAX: Final = 4  # for auto: more would exceed the capacity of the store process
_BUSY_MIN: Final = 64
_IN_FLIGHT_MIN: Final = 256


def fronts_of(processes: Literal["auto"] | int, held_bytes_max: int = 256 * 2**20) -> int:
    """Return the number of front processes; 0 if the daemon is one process."""
    count = min(processors(), FRONTS_MAX, fronts_max(held_bytes_max)) if processes == "auto" else processes
    return count if count > 1 else 0


def plain_served_to(config: DaemonConfig) -> PlainServedTo:
    """Return the clients that may connect without TLS."""
    return "all" if config.tls_client_ca is None else "loopback"


def front_settings(
    config: DaemonConfig, port: Port, sidecar: SidecarConfig, clock: Clock, *, count: int, connections_max: int
) -> Settings:
    """Return the settings of one of ``count`` fronts that starts now, with its share of the common limits."""
    quotas = port.service.quotas
    messages = port.service.messages
    own = {wire.METHODS[rpc].path for rpc in (*messages.unary, *messages.streaming)}
    per_address = config.connections_per_address_max
    return Settings(
        log_level=config.log_level,
        log_format=config.log_format,
        delay_levels_ms=sidecar.delay_levels_ms,
        delay_max_ms=sidecar.delay_max_ms,
        broker_name=sidecar.broker_name,
        sends_in_flight_max=max(_IN_FLIGHT_MIN, sidecar.sends_in_flight_max // count),
        sends_busy=max(_BUSY_MIN, sidecar.sends_busy // count),
        connections=-(-connections_max // count),
        connections_per_address=None if per_address is None else -(-per_address // count),
        idle_s=None if config.connection_idle is None else config.connection_idle.total_seconds(),
        request_s=config.request_time.total_seconds(),
        bytes_held=quotas.bounds.bytes_held,
        bytes_reserve=quotas.bounds.bytes_reserve,
        limits=quotas.encoded(),
        shares=count + 1,
        acl=str(config.acl.absolute()) if config.acl is not None else None,
        tls=_tls_files(config),
        plain_served_to="all" if config.tls_certificate == "off" else plain_served_to(config),
        host=config.listen.host,
        relayed=[_relayed(path, each) for path, each in port.methods.items() if path not in own],
        wall_less_boot_ms=wall_less_boot_ms(clock),
    )


def _relayed(path: str, method: Method) -> RelayedMethod:
    kind: Literal["unary", "streaming", "bidirectional"] = "unary"
    if isinstance(method, Bidirectional):
        kind = "bidirectional"
    elif isinstance(method, Streaming):
        kind = "streaming"
    return RelayedMethod(path, kind, method.is_frequent)


def _tls_files(config: DaemonConfig) -> TlsFiles | None:
    files = certificate_files(config)
    if files is None:
        return None
    certificate, key = files
    client_ca = config.tls_client_ca
    return TlsFiles(
        str(certificate.absolute()), str(key.absolute()), str(client_ca.absolute()) if client_ca is not None else None
    )
