"""``dmq broker``: topics, queues, consumers and lag of an Apache RocketMQ cluster.

Queries name servers and brokers of RocketMQ 4 and 5 directly, over the classic protocol. A broker that does not answer
is reported on stderr. The others are shown, and the exit code is 6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from broker_adapter.runtime.clock import SystemClock
from dmq.cli.nouns import noun
from dmq.cli.output import output as out
from dmq.cli.session.cluster import ClusterQuery, with_cluster
from dmq.cli.session.options import GroupArgument, Session, TopicArgument, with_watch

if TYPE_CHECKING:
    from broker_adapter.contracts.classic import Filter, HeldQueue
    from broker_adapter.contracts.message_queue import MessageQueue
    from broker_adapter.remoting import (
        BrokerSeen,
        GroupPosition,
        GroupSeen,
        MemberSeen,
        Part,
        QueueShares,
        Survey,
        TopicSeen,
    )

app = noun("broker")

_MASTER = 0
_QUEUE = ("TOPIC", "BROKER", "QUEUE")


@app.command()
@with_watch
@with_cluster
def routes(
    session: Session,
    cluster: ClusterQuery,
    *,
    topic: Annotated[
        str, typer.Argument(metavar="[TOPIC]", help="The topic.  [default: all]", show_default=False)
    ] = "",
) -> None:
    """Show the brokers of a cluster and the queues of its topics.

    The list contains a killed broker for two minutes, until the name servers remove it. Such a broker does not
    answer.
    """
    if topic:
        parts = cluster.ask(lambda survey: survey.route(topic))
        session.show([_part(each) for each in parts], lambda: _show_parts(parts))
        return

    async def both(survey: Survey) -> tuple[Sequence[BrokerSeen], Sequence[TopicSeen]]:
        return await survey.brokers(), await survey.topics()

    brokers, topics = cluster.ask(both)
    if session.as_json:
        out.show_json({"brokers": [_broker(each) for each in brokers], "topics": [_topic(each) for each in topics]})
        return
    out.show_table(
        ("CLUSTER", "BROKER", "ROLE", "ADDRESS", "VERSION", "STORED/S", "READ/S", "STATE"),
        [
            (
                *(each.cluster, each.broker, _role(each.number), each.address, each.version or "-"),
                *("-" if each.why else f"{rate:,.1f}" for rate in (each.stored_per_s, each.read_per_s)),
                each.why or "answers",
            )
            for each in brokers
        ],
        numbers=("STORED/S", "READ/S"),
    )
    typer.echo()
    out.show_table(
        ("TOPIC", "BROKERS", "READ QUEUES", "WRITE QUEUES"),
        [(each.topic, str(each.brokers), str(each.readable), str(each.writable)) for each in topics],
        numbers=("BROKERS", "READ QUEUES", "WRITE QUEUES"),
    )


@app.command()
@with_watch
@with_cluster
def queues(session: Session, cluster: ClusterQuery, *, topic: TopicArgument) -> None:
    """Show the offset range and last write time of each queue."""
    found = cluster.ask(lambda survey: survey.queues(topic))
    plain = [
        _named(queue)
        | {"min_offset": each.readable.begin, "max_offset": each.readable.end}
        | {"stored_last_at_ms": each.stored_last_at_ms or None}
        for queue, each in found.items()
    ]
    now_ms = SystemClock().now_ms()
    session.show_table(
        plain,
        ("BROKER", "QUEUE", "MIN OFFSET", "MAX OFFSET", "MESSAGES", "STORED LAST"),
        [
            (
                *(queue.broker, str(queue.queue_id), f"{each.readable.begin:,}", f"{each.readable.end:,}"),
                f"{each.readable.end - each.readable.begin:,}",
                out.distance(each.stored_last_at_ms, now_ms) or "never",
            )
            for queue, each in found.items()
        ],
        numbers=("QUEUE", "MIN OFFSET", "MAX OFFSET", "MESSAGES"),
    )


@app.command()
@with_watch
@with_cluster
def offsets(session: Session, cluster: ClusterQuery, *, group: GroupArgument) -> None:
    """Show the committed offset and the lag of a group in each queue.

    A queue without a committed offset has no lag. A broker of RocketMQ 4 may report offset 0 for such a queue.
    """
    found = cluster.ask(lambda survey: survey.positions(group))
    lag = sum(each.lag or 0 for each in found.values())
    never = sum(each.committed_offset is None for each in found.values())
    if not found and not session.as_json:
        out.note(f"group {group} never committed an offset and has no online members")
        return
    plain = [_named(queue) | _position(each) for queue, each in found.items()]
    now_ms = SystemClock().now_ms()
    session.show_table(
        {"group": group, "lag": lag, "never_committed": never, "queues": plain},
        (*_QUEUE, "BROKER OFFSET", "COMMITTED", "LAG", "CONSUMED UP TO"),
        [
            (
                *(queue.topic, queue.broker, str(queue.queue_id), f"{each.end_offset:,}"),
                "never" if each.committed_offset is None else f"{each.committed_offset:,}",
                "-" if each.lag is None else f"{each.lag:,}",
                out.distance(each.last_at_ms, now_ms) or "-",
            )
            for queue, each in found.items()
        ],
        numbers=("QUEUE", "BROKER OFFSET", "COMMITTED", "LAG"),
        details=("BROKER OFFSET", "COMMITTED"),
    )
    if not session.as_json:
        typer.echo()
        never_committed = f"{never:,} of {len(found):,} queues" if never else ""
        out.show_facts([("total lag", f"{lag:,}"), ("never committed", never_committed)])


@app.command()
@with_watch
@with_cluster
def consumers(
    session: Session,
    cluster: ClusterQuery,
    *,
    group: Annotated[
        str, typer.Argument(metavar="[GROUP]", help="The group.  [default: all]", show_default=False)
    ] = "",
) -> None:
    """Show the groups, or the members and queues of one group.

    Each member reports its own queues through a broker. The queues of a member that does not answer are unknown.
    """
    if group:
        shares = cluster.ask(lambda survey: survey.shares(group))
        session.show(_shares(shares), lambda: _show_shares(shares))
        return
    found = cluster.ask(lambda survey: survey.groups())
    session.show_table(
        [_group(each) for each in found],
        ("GROUP", "MEMBERS", "MODEL", "CONSUMES", "RETRIES", "TOPICS", "LAG"),
        [
            (
                *(each.group, str(len(each.members)), _model(each) or "-", _enabled(each), _retries(each)),
                *(str(len(each.topics)), f"{each.lag:,}"),
            )
            for each in found
        ],
        numbers=("MEMBERS", "RETRIES", "TOPICS", "LAG"),
        details=("RETRIES", "CONSUMES", "MODEL"),
    )


# -- routes ----------------------------------------------------------------------------------------


def _role(number: int) -> str:
    return "master" if number == _MASTER else f"slave {number}"


def _broker(seen: BrokerSeen) -> dict[str, Any]:
    known = seen._asdict()
    why = known.pop("why")
    if why:
        known |= dict.fromkeys(("version", "stored_per_s", "read_per_s"))
    return known | {"answers": not why, "error": why or None}


def _topic(seen: TopicSeen) -> dict[str, Any]:
    return {
        "topic": seen.topic,
        "brokers": seen.brokers,
        "read_queues": seen.readable,
        "write_queues": seen.writable,
    }


def _part(part: Part) -> dict[str, Any]:
    return {
        "broker": part.broker,
        "read_queues": part.readable,
        "write_queues": part.writable,
        "perm": _perm(part),
        "master": part.addresses.get(_MASTER),
        "slaves": {str(number): address for number, address in part.addresses.items() if number != _MASTER},
    }


def _perm(part: Part) -> str:
    from broker_adapter.remoting import READABLE, WRITABLE

    return "r" * bool(part.perm & READABLE) + "w" * bool(part.perm & WRITABLE)


def _show_parts(parts: Sequence[Part]) -> None:
    out.show_table(
        ("BROKER", "READ QUEUES", "WRITE QUEUES", "PERM", "MASTER", "SLAVES"),
        [
            (
                *(each.broker, str(each.readable), str(each.writable), _perm(each) or "none"),
                each.addresses.get(_MASTER, "NONE NOW"),
                " ".join(f"{number}={address}" for number, address in each.addresses.items() if number != _MASTER),
            )
            for each in parts
        ],
        numbers=("READ QUEUES", "WRITE QUEUES"),
    )


# -- groups ----------------------------------------------------------------------------------------


def _named(queue: MessageQueue) -> dict[str, Any]:
    return {"topic": queue.topic, "broker": queue.broker, "queue": queue.queue_id}


def _position(position: GroupPosition) -> dict[str, Any]:
    return {
        "broker_offset": position.end_offset,
        "committed_offset": position.committed_offset,
        "lag": position.lag,
        "consumed_up_to_ms": position.last_at_ms or None,
    }


def _group(seen: GroupSeen) -> dict[str, Any]:
    return {
        "group": seen.group,
        "members": len(seen.members),
        "model": _model(seen) or None,
        "is_enabled": seen.settings.is_enabled if seen.settings is not None else None,
        "retries_max": seen.settings.retries_max if seen.settings is not None else None,
        "topics": list(seen.topics),
        "lag": seen.lag,
    }


def _model(seen: GroupSeen) -> str:
    said = {"broadcasting" if each.is_broadcast else "clustering" for each in seen.connections.values()}
    return " and ".join(sorted(said))


def _enabled(seen: GroupSeen) -> str:
    if seen.settings is None:
        return "-"
    return "yes" if seen.settings.is_enabled else "DISABLED"


def _retries(seen: GroupSeen) -> str:
    return str(seen.settings.retries_max) if seen.settings is not None else "-"


def _subscriptions(filters: Mapping[str, Filter]) -> list[dict[str, Any]]:
    return [{"topic": topic, "expression": each.expression, "is_sql": each.is_sql} for topic, each in filters.items()]


def _member(member: MemberSeen) -> dict[str, Any]:
    from broker_adapter.remoting import version_text

    state = member.state
    return {
        "client_id": member.connected.client_id,
        "address": member.connected.address,
        "language": member.connected.language,
        "version": version_text(member.connected.version),
        "brokers": list(member.brokers),
        "answers": state is not None,
        "error": member.why or None,
        "in_order": state.in_order if state is not None else None,
        "started_at_ms": state.started_at_ms or None if state is not None else None,
        "subscriptions": _subscriptions(dict(sorted(state.filters.items()))) if state is not None else None,
        "queues": [_held(held, in_order=state.in_order) for held in state.queues] if state is not None else None,
    }


def _held(held: HeldQueue, *, in_order: bool) -> dict[str, Any]:
    return _named(held.queue) | {
        "commit_offset": held.commit_offset,
        "held": held.messages,
        "held_bytes": held.size_bytes,
        "is_locked": held.is_locked if in_order else None,
        "pulled_at_ms": held.pulled_at_ms or None,
        "consumed_at_ms": held.consumed_at_ms or None,
    }


def _shares(shares: QueueShares) -> dict[str, Any]:
    owners = [
        _named(queue) | {"owners": list(owners) if owners or shares.are_known else None}
        for queue, owners in shares.owners.items()
    ]
    known = _group(shares.seen) | {"subscriptions": _subscriptions(shares.seen.filters)}
    return known | {"members": [_member(each) for each in shares.members], "owners": owners}


def _show_shares(shares: QueueShares) -> None:
    seen = shares.seen
    out.show_facts(
        [
            ("group", seen.group),
            ("model", _model(seen)),
            ("consumes", _enabled(seen)),
            ("retries", _retries(seen)),
            ("members", str(len(shares.members)) if shares.members else "nobody is online"),
            ("lag", f"{seen.lag:,} in {len(seen.topics)} topics"),
        ]
    )
    if not shares.members:
        return
    now_ms = SystemClock().now_ms()
    typer.echo()
    members = [_member(each) for each in shares.members]
    out.show_table(
        ("MEMBER", "ADDRESS", "LANGUAGE", "VERSION", "SEEN BY", "STARTED", "ORDER", "QUEUES", "HELD"),
        [
            (
                *(each["client_id"], each["address"], each["language"], each["version"], " ".join(each["brokers"])),
                *(out.distance(each["started_at_ms"] or 0, now_ms) or "-", "yes" if each["in_order"] else ""),
                *_counts(each["queues"]),
            )
            for each in members
        ],
        numbers=("QUEUES", "HELD"),
        details=("VERSION", "LANGUAGE", "ORDER", "STARTED", "SEEN BY", "ADDRESS"),
    )
    typer.echo()
    out.show_table(("TOPIC", "FILTER", "SUBSCRIBED TO BY"), _wanted(shares))
    typer.echo()
    _show_owners(shares, now_ms)
    for each in shares.members:
        if each.state is None:
            out.note(f"member {each.connected.client_id} does not report its queues: {each.why}")


def _show_owners(shares: QueueShares, now_ms: int) -> None:
    nobody = "nobody" if shares.are_known else "unknown"
    held = {
        (each.connected.client_id, one.queue): (f"{one.messages:,}", out.distance(one.consumed_at_ms, now_ms))
        for each in shares.members
        if each.state is not None
        for one in each.state.queues
    }
    out.show_table(
        (*_QUEUE, "OWNER", "HELD", "CONSUMED LAST"),
        [
            (queue.topic, queue.broker, str(queue.queue_id), owner or nobody, *held.get((owner, queue), ("", "")))
            for queue, owners in shares.owners.items()
            for owner in owners or ("",)
        ],
        numbers=("QUEUE", "HELD"),
    )
    for queue, owners in shares.owners.items():
        if len(owners) > 1 and _model(shares.seen) != "broadcasting":
            where = f"queue {queue.queue_id} of {queue.topic} at {queue.broker}"
            out.note(f"{where} has {len(owners)} owners: a rebalance is in progress, or the allocation rules differ")


def _counts(queues: Sequence[Mapping[str, Any]] | None) -> tuple[str, str]:
    if queues is None:
        return "unknown", "unknown"
    return str(len(queues)), f"{sum(each['held'] for each in queues):,}"


def _wanted(shares: QueueShares) -> Sequence[tuple[str, str, str]]:
    """Return each filter with the members that report it: all members of a group should have the same."""
    by: dict[tuple[str, str], list[str]] = {}
    for topic, wanted in shares.seen.filters.items():
        by[topic, _text(wanted)] = []
    for each in shares.members:
        for topic, wanted in each.state.filters.items() if each.state is not None else ():
            by.setdefault((topic, _text(wanted)), []).append(each.connected.client_id)

    def who(members: Sequence[str]) -> str:
        return "all members" if len(members) == len(shares.members) else " ".join(members) or "unknown"

    return [(topic, wanted, who(by[topic, wanted])) for topic, wanted in sorted(by)]


def _text(wanted: Filter) -> str:
    return f"SQL92: {wanted.expression}" if wanted.is_sql else wanted.expression
