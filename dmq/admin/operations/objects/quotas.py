"""RPCs of ``rockdmq.admin.v1.AdminService`` about quotas of keys and addresses."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable

from broker_adapter.contracts.errors import Refused, Rule
from dmq.acl.file import is_access_key
from dmq.acl.quotas import ADDRESS, KEY, LIMIT_MAX, Holder, Quota, Quotas
from dmq.admin import admin_v1 as wire
from dmq.http2 import LOOPBACK, address_of


class QuotaCalls:
    """RPCs of quotas. Raise ``Refused`` for invalid input, and the exceptions of ``keep``, which makes limits
    durable.
    """

    def __init__(self, quotas: Quotas | None = None, keep: Callable[[bytes], Awaitable[None]] | None = None) -> None:
        """Without ``quotas`` there are no limits."""
        self._quotas = quotas
        self._keep = keep

    async def list_quotas(self, _request: wire.ListQuotasRequest) -> wire.ListQuotasResponse:
        """List each key and address with a current use or an own limit."""
        if self._quotas is None:
            return wire.ListQuotasResponse()
        return wire.ListQuotasResponse(quotas=[_row(*use) for use in self._quotas.rows()])

    async def set_quota(self, request: wire.SetQuotaRequest) -> wire.SetQuotaResponse:
        """Set a limit, or restore its default; effective at once, and durable on return."""
        if self._quotas is None or self._keep is None:
            raise Refused(Rule.REQUEST, "this daemon has no quotas")
        holder, quota = _holder(request.kind, request.name), _quota(request.quota)
        limit = request.limit if request.HasField("limit") else None
        if limit is not None and not 0 <= limit <= LIMIT_MAX:
            raise Refused(Rule.REQUEST, "the limit is out of range", value=limit, limit=f"0 to {LIMIT_MAX}")
        await self._keep(self._quotas.change(holder, quota, limit))
        used, now = self._quotas.used(quota, holder), self._quotas.limit(quota, holder)
        return wire.SetQuotaResponse(quota=_row(holder, quota, used, now, limit is not None))


def _row(holder: Holder, quota: Quota, used: int, limit: int | None, is_set: bool) -> wire.Quota:
    row = wire.Quota(kind=holder.kind, name=holder.name, quota=quota.value, used=used, is_set=is_set)
    if limit is not None:
        row.limit = limit
    return row


def _holder(kind: str, name: str) -> Holder:
    if kind == KEY:
        if not is_access_key(name):
            raise Refused(Rule.REQUEST, "not an access key", value=name)
        return Holder(KEY, name)
    if kind != ADDRESS:
        raise Refused(Rule.REQUEST, "unknown kind of holder", value=kind, limit=f"{KEY}, {ADDRESS}")
    if name == LOOPBACK:
        return Holder(ADDRESS, LOOPBACK)
    try:
        return Holder(ADDRESS, address_of((str(ipaddress.ip_address(name.partition("/")[0])),)))
    except ValueError:
        raise Refused(Rule.REQUEST, "not an address", value=name, limit=f"an IP address, or {LOOPBACK}") from None


def _quota(name: str) -> Quota:
    try:
        return Quota(name)
    except ValueError:
        raise Refused(Rule.REQUEST, "unknown quota", value=name, limit=", ".join(Quota)) from None
