"""Constructor of a cluster client from its address."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from broker_adapter.remoting.broker import RemotingBroker
from broker_adapter.remoting.calls import RemotingOptions

_ALLOWED = [each.name for each in fields(RemotingOptions) if each.name != "names"]


async def open_remoting(address: str, *, client_id: str = "", **options: Any) -> RemotingBroker:  # noqa: ANN401
    """Return a client of the cluster with the name servers ``address``: ``host:port``, separated by ``;`` or ``,``.

    ``options`` are the fields of ``RemotingOptions``. The client connects on first use. ``ValueError`` for an invalid
    address or option.
    """
    names = tuple(each.strip() for each in address.replace(",", ";").strip("/").split(";") if each.strip())
    for name in names or ("",):
        host, colon, port = name.rpartition(":")
        if not host or not colon or not port.isdigit() or not 0 < int(port) < 65_536:
            raise ValueError(f"expected name servers as host:port, separated by ';', got {name!r} in {address!r}")
    unknown = sorted(set(options) - set(_ALLOWED))
    if unknown:
        raise ValueError(f"no such option of rocketmq-remoting: {', '.join(unknown)}; allowed: {', '.join(_ALLOWED)}")
    if options.get("tls_ca") is not None:
        options["tls_ca"] = Path(options["tls_ca"])
    return RemotingBroker(RemotingOptions(names=names, **options), client_id=client_id)
