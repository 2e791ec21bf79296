"""Checks before the start: faults that prevent it and are detectable before the store is opened. Nothing is changed.

A port in use or an invalid key file may cause a restart loop. Without these checks the daemon would recover its store
at each start, and leave an event and a snapshot each time.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.extras import ExtraMissing
from dmq.acl.file import read as read_keys
from dmq.admin.operations.daemon import rule_of
from dmq.config.settings import DaemonConfig
from dmq.config.units import Address
from dmq.daemon.opening import require_replica, require_trail
from dmq.daemon.server import certificates_of, require_web
from dmq.daemon.telemetry import require_tracing
from dmq.errors import AddressInUse, DmqError, StartRefused
from dmq.notifications import check_notifications, check_receivers
from dmq.recovery import check_backup_dir
from dmq.store.files.cell import holder_of
from dmq.store.schema.cell.files import CELL_FILE

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # for example an IPv6 host name without IPv6


def refuse_start(config: DaemonConfig, clock: Clock) -> None:
    """Raise ``StartRefused`` with all faults. Faults of the trail are left to the export, which delays no client."""
    found = _found([*_of_files(config, clock), *_of_addresses(config)])
    if found:
        raise StartRefused("; ".join(found))


def problems_of(config: DaemonConfig, clock: Clock) -> list[str]:
    """Return all faults, one line each. Addresses are skipped if a daemon runs on the same directory."""
    checks: list[Callable[[], object]] = [
        *_of_files(config, clock),
        *(partial(_check_trail_folders, config), partial(check_receivers, config)),
    ]
    if holder_of(config.data) is None:
        checks += _of_addresses(config)
    return _found(checks)


def cluster_report(config: DaemonConfig, clock: Clock) -> tuple[list[str], list[str]]:
    """Call each address of the cluster, within seconds; return the kind of server that answered, and the problems.

    Each is a line. A cluster that does not answer is no problem: a daemon starts and waits for it.
    """
    if config.broker == "embedded":
        return [], []
    from dmq.daemon.cluster import ServerKind, kind_of, misplaced  # gRPC's client is loaded for a cluster only

    addresses = [str(each) for each in config.endpoints or config.namesrv]

    async def ask() -> list[ServerKind | BaseException]:
        return await asyncio.gather(*(kind_of(each, config, clock) for each in addresses), return_exceptions=True)

    found = dict(zip(addresses, asyncio.run(ask()), strict=True))
    answered = [
        f"cluster: {each} is {kind.value}" if kind is not ServerKind.NONE else f"cluster: nothing answers at {each}"
        for each, kind in found.items()
        if isinstance(kind, ServerKind)
    ]
    wrong = [
        f"cluster: {each}: {misplaced(kind, config.broker)}"
        for each, kind in found.items()
        if isinstance(kind, ServerKind) and kind is not ServerKind.NONE and misplaced(kind, config.broker)
    ]
    wrong += [f"cluster: {error}" for error in found.values() if isinstance(error, BaseException)]
    return answered, wrong


def _found(checks: list[Callable[[], object]]) -> list[str]:
    said = []
    for check in checks:
        try:
            check()
        except (DmqError, ExtraMissing) as error:
            said.append(str(error))
    return said


def _of_files(config: DaemonConfig, clock: Clock) -> Iterator[Callable[[], object]]:
    yield partial(check_folder, "data", config.data)
    if config.must_exist:
        yield partial(_check_exists, config.data)
    if config.trail_path is not None:
        yield require_trail
    if config.acl is not None:
        yield partial(_check_keys, config.acl)
    yield partial(_check_tls, config, clock)
    for key in ("tls_client_ca", "cluster_tls_ca", "replica_link_ca"):
        if (authority := getattr(config, key)) is not None:
            yield partial(_check_authority, key, authority)
    yield partial(require_web, config)
    yield partial(check_notifications, config)
    yield partial(require_tracing, config)
    if config.replica != "off":
        yield partial(require_replica, config)
    yield partial(rule_of, config)
    if config.backup_dir is not None:
        yield partial(check_backup_dir, config.backup_dir)


def _of_addresses(config: DaemonConfig) -> list[Callable[[], object]]:
    metrics = config.metrics_listen if config.metrics_listen_is_explicit else None  # a default port may be replaced
    addresses = (
        ("listen", config.listen, "gRPC"),
        ("metrics_listen", metrics, "metrics"),
        ("http_api", config.http_api, "HTTP API"),
        ("console", config.console, "console"),
        ("replica_link", config.replica_link, "direct link"),
    )
    return [
        *(partial(_check_address, key, each, title) for key, each, title in addresses if isinstance(each, Address)),
        *([partial(_refuse_same, config.listen)] if metrics == config.listen and config.listen.port else []),
    ]


def check_folder(key: str, path: Path) -> None:
    """Raise ``DmqError`` unless ``path`` is a writable directory or can be created."""
    place = path.absolute()
    try:
        place.stat()
    except (FileNotFoundError, NotADirectoryError):  # it is created if its parent is a directory
        while not os.path.lexists(place) and place != place.parent:
            place = place.parent
    except OSError as error:
        raise DmqError(f"{path} cannot be the directory of {key}: {error.strerror or error}") from error
    if not place.is_dir():
        what = "is a link that leads to nothing" if place.is_symlink() else "is a file"
        raise DmqError(f"{path} cannot be the directory of {key}: {place} {what}")
    if not os.access(place, os.W_OK | os.X_OK):
        raise DmqError(f"{path} cannot be written: this user has no write permission on {place}")
    if not os.statvfs(place).f_blocks:  # /proc and /sys, where root has write permission but cannot create directories
        raise DmqError(f"{path} cannot be the directory of {key}: the file system of {place} stores no files")


def _check_exists(path: Path) -> None:
    if not (path / CELL_FILE).exists():
        raise DmqError(
            f"{path} contains no store, and must_exist is set: mount its volume, or start once without must_exist "
            "to create an empty store"
        )


def _check_trail_folders(config: DaemonConfig) -> None:
    if config.trail_path is not None and config.trail != "auto":
        check_folder("trail", config.trail_path)
    if config.audit_reports_path is not None and config.audit_reports != "auto":
        check_folder("audit_reports", config.audit_reports_path)


def _check_keys(path: Path) -> None:
    try:
        read_keys(path)
    except DmqError as error:
        raise DmqError(f"acl: {error}") from error


def _check_tls(config: DaemonConfig, clock: Clock) -> None:
    certificates = certificates_of(config, clock, makes=False)
    if certificates is None:
        return
    certificates.tells_expiry = False  # expiry is reported when the certificate is used
    certificates.client_ca = None  # checked separately, because the certificate may not exist yet
    try:
        certificates.context()
    except DmqError as error:
        raise DmqError(f"tls_certificate: {error}") from error


def _check_authority(key: str, path: Path) -> None:
    try:
        ssl.create_default_context(cafile=str(path))
    except (OSError, ssl.SSLError) as error:
        why = getattr(error, "reason", None) or error.strerror or str(error)
        raise DmqError(f"{key}: {path} cannot be used: {why}") from error


def _check_address(key: str, address: Address, what: str) -> None:
    if not address.port:  # any free port
        return
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise _taken(key, address, what, error) from error
    absent: OSError | None = None
    for family, place in {(each[0], each[4]) for each in found}:
        try:
            _bind(family, place)
            absent = None
            break
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise _taken(key, address, what, error) from error
            absent = error
    if absent is not None:
        raise _taken(key, address, what, absent) from absent


def _bind(family: int, place: tuple[object, ...]) -> None:
    """Bind an address and release it. No client can connect in between, because the socket does not listen."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # remains of an ended daemon do not block the port
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind(place)


def _taken(key: str, address: Address, what: str, error: OSError) -> DmqError:
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(f"{address} is in use by another process ({what}): end that process, or set {key}")
    return DmqError(
        f"cannot listen on {address} ({what}): {error.strerror or error}: set {key} to an address of this host"
    )


def _refuse_same(address: Address) -> None:
    raise DmqError(f"listen and metrics_listen are both {address}: set another port for one of them")
