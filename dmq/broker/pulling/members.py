"""Members of pulling groups, and their queue locks: in memory, on the monotonic clock, with limits.

Both are advisory for clients that share a group: every client can read every queue. A restart clears both until the
clients report again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from broker_adapter.contracts.errors import Overloaded
from broker_adapter.runtime.clock import Clock

SILENT_S_MAX = 120.0  # as RocketMQ; clients send a heartbeat every 10 to 30 s
LOCK_S = 60.0  # as RocketMQ; clients renew a lock every 20 s
MEMBERS_MAX = 20_000
LOCKS_MAX = 100_000

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Members:
    """Clients of each group. At the limit, the clients silent for longest are dropped."""

    def __init__(self, clock: Clock, *, members_max: int = MEMBERS_MAX, silent_s_max: float = SILENT_S_MAX) -> None:
        self._clock = clock
        self._silent_s_max = silent_s_max
        self._members_max = members_max
        self._seen_s: OrderedDict[tuple[str, str], float] = OrderedDict()  # (group, client id), longest silent first
        self._by_group: dict[str, set[str]] = {}
        self._by_client: dict[str, set[str]] = {}

    def __len__(self) -> int:
        """Number of memberships; silent ones count until the next call that expires them."""
        return len(self._seen_s)

    def seen(self, group: str, client_id: str) -> bool:
        """Record a sign of life; return True if the client is new in the group."""
        member = (group, client_id)
        is_new = member not in self._seen_s
        if is_new:
            self._drop_silent(self._members_max - 1)
            self._by_group.setdefault(group, set()).add(client_id)
            self._by_client.setdefault(client_id, set()).add(group)
        self._seen_s[member] = self._clock.monotonic_s()
        self._seen_s.move_to_end(member)
        return is_new

    def gone(self, client_id: str, group: str = "") -> set[str]:
        """Remove a client from one group, or from all; return the groups it was in."""
        left = {each for each in self._by_client.get(client_id, ()) if group in {"", each}}
        for each in left:
            self._drop(each, client_id)
        return left

    def expire(self) -> set[str]:
        """Remove clients that are silent for too long; return the groups that lost a member."""
        return self._drop_silent(self._members_max)

    def of(self, group: str) -> list[str]:
        """Return the members of a group, sorted."""
        self._drop_silent(self._members_max)
        return sorted(self._by_group.get(group, ()))

    def _drop_silent(self, kept_max: int) -> set[str]:
        oldest_s = self._clock.monotonic_s() - self._silent_s_max
        lost: set[str] = set()
        while self._seen_s:
            member, seen_s = next(iter(self._seen_s.items()))
            if seen_s > oldest_s and len(self._seen_s) <= kept_max:
                break
            self._drop(*member)
            lost.add(member[0])
        return lost

    def _drop(self, group: str, client_id: str) -> None:
        del self._seen_s[group, client_id]
        _discard(self._by_group, group, client_id)
        _discard(self._by_client, client_id, group)


class _Lock(NamedTuple):
    client_id: str
    until_s: float


class MemberLocks:
    """Queue locks of the clients of a group. All locks have the same duration, so they end in the order of renewal."""

    def __init__(self, clock: Clock, *, locks_max: int = LOCKS_MAX) -> None:
        self._clock = clock
        self._locks_max = locks_max
        self._locks: OrderedDict[tuple[str, str, int], _Lock] = (
            OrderedDict()
        )  # (group, topic, queue), next to end first
        self._by_client: dict[str, set[tuple[str, str, int]]] = {}

    def lock(self, group: str, client_id: str, topic: str, queue_ids: Iterable[int]) -> list[int]:
        """As ``PullBroker.lock``; raise ``Overloaded`` if there are too many locks, with none acquired."""
        now_s = self._clock.monotonic_s()
        self._drop_ended(now_s)
        wanted = [
            queue_id
            for queue_id in dict.fromkeys(queue_ids)
            if (held := self._locks.get((group, topic, queue_id))) is None or held.client_id == client_id
        ]
        added = sum((group, topic, queue_id) not in self._locks for queue_id in wanted)
        if len(self._locks) + added > self._locks_max:
            raise Overloaded("queues that are locked", limit=self._locks_max)
        for queue_id in wanted:
            place = (group, topic, queue_id)
            self._locks[place] = _Lock(client_id, now_s + LOCK_S)
            self._locks.move_to_end(place)
            self._by_client.setdefault(client_id, set()).add(place)
        return wanted

    def unlock(self, group: str, client_id: str, topic: str, queue_ids: Sequence[int]) -> None:
        """As ``PullBroker.unlock``."""
        for queue_id in queue_ids:
            held = self._locks.get((group, topic, queue_id))
            if held is not None and held.client_id == client_id:
                self._drop((group, topic, queue_id))

    def gone(self, client_id: str, group: str = "") -> None:
        """Release all locks of a client, or those for one group."""
        for place in list(self._by_client.get(client_id, ())):
            if group in {"", place[0]}:
                self._drop(place)

    def _drop_ended(self, now_s: float) -> None:
        while self._locks:
            place, held = next(iter(self._locks.items()))
            if held.until_s > now_s:
                return
            self._drop(place)

    def _drop(self, place: tuple[str, str, int]) -> None:
        _discard(self._by_client, self._locks.pop(place).client_id, place)


def _discard(sets: dict[_Key, set[_Value]], key: _Key, value: _Value) -> None:
    found = sets[key]
    found.discard(value)
    if not found:
        del sets[key]
