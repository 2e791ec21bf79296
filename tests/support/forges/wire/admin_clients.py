"""Clients as the admin service finds them, fixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError
from support.forges.wire.admin_status import NOW

from broker_adapter.contracts.errors import Refused, Rule
from dmq.admin import admin_v1 as wire
from dmq.admin.requests import ClientSilent

CLIENTS = (
    wire.Client(
        client_id="p@1",
        kind="PRODUCER",
        group="",
        language="PYTHON",
        version="5.1.2",
        last_seen_at_ms=NOW - 12_000,
        streams=0,
    ),
    wire.Client(
        client_id="c@1",
        kind="PUSH_CONSUMER",
        group="billing",
        language="JAVA",
        version="5.2.0",
        last_seen_at_ms=NOW - 3_000,
        streams=1,
    ),
)


@dataclass
class FixedClients:
    """Two clients, of which the producer answers nothing; one more takes every message, and one cannot read it."""

    timeouts_s: list[float] = field(default_factory=list)

    def clients(self, group: str) -> Sequence[wire.Client]:
        """As ``ClientSource.clients``."""
        return [client for client in CLIENTS if not group or client.group == group]

    async def stack(self, client_id: str, timeout_s: float) -> str:
        """As ``ClientSource.stack``."""
        self._ask(client_id, timeout_s)
        return "main:\n\tat Main.run\x1b[2J\n"

    async def verify(self, client_id: str, payload: bytes, timeout_s: float) -> tuple[int, str]:
        """As ``ClientSource.verify``."""
        self._ask(client_id, timeout_s)
        if client_id == "reads":
            raise DecodeError("damaged")
        return (20000, "") if client_id == "takes" else (60000, "no")

    def _ask(self, client_id: str, timeout_s: float) -> None:
        self.timeouts_s.append(timeout_s)
        if client_id == "gone":
            raise Refused(Rule.NOT_FOUND, "no client with this id is connected", value=client_id)
        if client_id == "p@1":
            raise ClientSilent(f"the client {client_id} did not answer within {timeout_s:g} s")
