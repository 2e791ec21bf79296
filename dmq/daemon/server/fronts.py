"""Number of front processes of a daemon, from its usable processors, and the settings of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.config.settings import DaemonConfig, fronts_max
from dmq.daemon.server.files import certificate_files
from dmq.http2 import Bidirectional, Method, PlainServedTo, Streaming
from dmq.processes.clocks import wall_less_boot_ms
from dmq.processes.settings import RelayedMethod, Settings, TlsFiles
from dmq.rocketmq_server.sessions.settings import SidecarConfig
from dmq.rocketmq_server.transport.http2_server import Port

FRONTS_MAX: Final = 4  # for auto: more would exceed the capacity of the store process
_BUSY_MIN: Final = 64
_IN_FLIGHT_MIN: Final = 256
_OWN_GROUPS: Final = Path("/proc/self/cgroup")
_MOUNT: Final = Path("/sys/fs/cgroup")


def fronts_of(processes: Literal["auto"] | int, held_bytes_max: int = 256 * 2**20) -> int:
    """Return the number of front processes; 0 if the daemon is one process."""
    count = min(processors(), FRONTS_MAX, fronts_max(held_bytes_max)) if processes == "auto" else processes
    return count if count > 1 else 0


def processors(own_groups: Path = _OWN_GROUPS, mount: Path = _MOUNT) -> int:
    """Return the number of whole processors that this process may use, by its affinity and its quotas; at least 1.

    ``own_groups`` names its control groups, which are below ``mount`` on Linux, in versions 1 and 2.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([count, *_quotas(own_groups, mount)]))


def _quotas(own_groups: Path, mount: Path) -> Iterator[int]:
    """Yield the whole processors that each control group of this process, or a parent of it, allows."""
    with suppress(OSError):
        for line in own_groups.read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                yield from _along(mount, path, _quota_2)
            elif "cpu" in controllers.split(","):
                yield from _along(mount / "cpu", path, _quota_1)


def _along(root: Path, path: str, quota_of: Callable[[Path], tuple[int, int]]) -> Iterator[int]:
    """Yield the quotas on the path from a group to the root. A container may see its own group as the root."""
    for group in (Path(path.lstrip("/")), *Path(path.lstrip("/")).parents):
        with suppress(OSError, ValueError):  # missing, or without a quota
            quota_us, period_us = quota_of(root / group)
            if quota_us > 0 and period_us > 0:
                yield quota_us // period_us


def _quota_2(group: Path) -> tuple[int, int]:
    quota_us, period_us = (group / "cpu.max").read_text().split()
    return int(quota_us), int(period_us)  # "max" is not a number


def _quota_1(group: Path) -> tuple[int, int]:
    return int((group / "cpu.cfs_quota_us").read_text()), int((group / "cpu.cfs_period_us").read_text())


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
