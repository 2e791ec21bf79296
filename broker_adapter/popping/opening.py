"""Constructor of a client for a cluster or daemon from the address of its gRPC proxies."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from broker_adapter.contracts.endpoints import parse_endpoints
from broker_adapter.popping.broker import PoppedBroker
from broker_adapter.rocketmq import ClusterOptions, RocketMQBroker
from broker_adapter.runtime.clock import SystemClock
from broker_adapter.runtime.log import LibraryLog

_ALLOWED = [each.name for each in fields(ClusterOptions) if each.name != "endpoints"]
_SENDS_MAX = 3

_log = LibraryLog("broker_adapter.rocketmq")


async def open_rocketmq(address: str, *, client_id: str = "", **options: Any) -> PoppedBroker:  # noqa: ANN401
    """Return a client of the proxies at ``address``: ``host:port``, separated by ``;`` or ``,``.

    ``options`` are the fields of ``ClusterOptions``. The client connects on first use. ``ValueError`` for an invalid
    address or option.
    """
    endpoints = parse_endpoints(address.strip("/"))
    unknown = sorted(set(options) - set(_ALLOWED))
    if unknown:
        raise ValueError(f"no such option of rocketmq: {', '.join(unknown)}; allowed: {', '.join(_ALLOWED)}")
    if options.get("tls_ca") is not None:
        options["tls_ca"] = Path(options["tls_ca"])
    # Producers make three attempts themselves. Each attempt only needs to try the given proxies in turn.
    options.setdefault("sends_max", min(len(endpoints), _SENDS_MAX))
    clock = SystemClock()
    broker = RocketMQBroker(ClusterOptions(endpoints=endpoints, **options), clock, _log.info)
    return PoppedBroker(
        broker, broker, name=";".join(endpoints), client_id=client_id, clock=clock, on_close=broker.close
    )
