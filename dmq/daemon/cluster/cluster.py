"""Cluster side of the daemon: the adapter, the forwarder, and the broker that clients use."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import structlog

from broker_adapter.contracts.classic import Start
from broker_adapter.leasing import LeasingBroker, LeasingOptions
from broker_adapter.remoting import RemotingBroker
from broker_adapter.rocketmq import RocketMQBroker
from broker_adapter.runtime.clock import Clock
from dmq.admin import admin_v1 as wire
from dmq.broker import EmbeddedBroker
from dmq.cluster import Cluster, ClusterBroker, Forwarder, InnerTopic, RetriesHere
from dmq.config.settings import DaemonConfig
from dmq.daemon.cluster.kind import KindWatch
from dmq.daemon.cluster.options import grpc_options, remoting_options
from dmq.metrics.registry import Metrics

log = structlog.get_logger("dmq.daemon")

_TROUBLES_MAX = 100


class ClusterSide:
    """Cluster side of a daemon. Owned by the event loop. ``start`` it before clients connect, ``close`` it before the
    broker.
    """

    def __init__(self, config: DaemonConfig, clock: Clock, broker: EmbeddedBroker, metrics: Metrics) -> None:
        self._clock = clock
        self._grace_s = config.shutdown_grace_s
        self._addresses = tuple(map(str, config.endpoints or config.namesrv))
        self._away_since_ms = 0
        self._lateness = metrics.forward_lateness
        timeout_ms = round(config.cluster_timeout.total_seconds() * 1000)
        self._kinds = KindWatch(config, clock, _log_misplaced)
        self._adapter = _adapter_of(config, clock, timeout_ms, self._told)
        self._forwarder = Forwarder(
            broker,
            self._adapter,
            clock,
            in_flight_max=config.forward_in_flight_max,
            observe=metrics.was_forwarded,
        )
        self.front = ClusterBroker(
            broker,
            self._adapter,
            self._forwarder,
            accepts_while_away=config.away == "accept",
            timeout_ms=timeout_ms,
            here=RetriesHere(broker, self._adapter, clock, default=config.retries),
        )
        self.inner: InnerTopic | None = None
        if config.inner_topic != "off":
            self.inner = InnerTopic(
                self._adapter,
                broker,
                clock,
                topic=config.inner_topic,
                group=config.inner_group,
                levels_ms=config.delay_levels_ms,
                delay_max_ms=config.delay_max_ms,
            )
        totals = self._forwarder.totals
        metrics.forwarded.follow(lambda: totals.forwarded)
        metrics.forward_refused.follow(lambda: totals.refused)
        metrics.forward_in_doubt.follow(lambda: totals.in_doubt)
        metrics.kept.follow(lambda: self.front.kept_total)
        metrics.to_forward.set_function(lambda: sum(lane.waiting for lane in list(self._forwarder.lanes.values())))
        metrics.cluster_away.set_function(lambda: bool(self._away_since_ms))

    async def start(self) -> None:
        """Start to forward stored messages."""
        await self._forwarder.start()
        if self.inner is not None:
            self.inner.start()

    async def close(self) -> None:
        """Stop sending, wait up to the grace period for answers, and disconnect from the cluster."""
        if self.inner is not None:
            await self.inner.close()
        await self.front.close()
        await self._forwarder.close(self._grace_s)
        await self._kinds.close()
        await self._adapter.close()

    def status(self) -> wire.Cluster:
        """Return the status of the cluster and of the connections to it. Call it on the loop."""
        totals, lanes = self._forwarder.totals, self._forwarder.lanes.values()
        failing = islice((lane for lane in lanes if lane.gate.error), _TROUBLES_MAX)
        return wire.Cluster(
            endpoints=self._addresses,
            away_since_ms=self._away_since_ms,
            proxies=[
                wire.ProxyTrouble(address=each, why=self._kinds.misplaced.get(each, why))
                for each, why in self._adapter.errors.items()
            ],
            waiting=sum(lane.waiting for lane in lanes),
            in_flight=sum(lane.in_flight for lane in lanes),
            forwarded=totals.forwarded,
            refused=totals.refused,
            in_doubt=totals.in_doubt,
            kept=self.front.kept_total,
            lateness=wire.Lateness(
                count=self._lateness.count,
                p50_ms=self._lateness.quantile(0.5) * 1000,
                p99_ms=self._lateness.quantile(0.99) * 1000,
                max_ms=self._lateness.max * 1000,
            ),
            lanes=[wire.LaneTrouble(topic=lane.topic, waiting=lane.waiting, why=lane.gate.error) for lane in failing],
            inner=self._inner_status(),
        )

    def _inner_status(self) -> wire.Inner | None:
        inner = self.inner
        if inner is None:
            return None
        return wire.Inner(
            topic=inner.topic, fetched=inner.fetched_total, unreadable=inner.unreadable_total, error=inner.error
        )

    def remark(self) -> str:
        """Return a warning for the health status; empty if there is none."""
        if not self._away_since_ms:
            return ""
        wrong = "; ".join(f"{address}: {why}" for address, why in self._kinds.misplaced.items())
        return f"cluster: {wrong or 'none of its addresses answers'}; see dmq status"

    def _told(self, event: str, **fields: object) -> None:
        """Handle an event of a proxy, or of a broker or name server."""
        is_return = event in {"proxy_returned", "broker_reachable"}
        say: Callable[..., object] = log.info if is_return else log.warning
        say(event, **fields)
        address = str(fields.get("address"))
        if is_return:
            self._kinds.answers(address)
        elif event in {"proxy_isolated", "broker_unreachable"} and address in self._addresses:
            self._kinds.ask(address)
        if self._adapter.is_away:
            if not self._away_since_ms:
                self._away_since_ms = self._clock.now_ms()
                log.warning("cluster_unreachable")
                self._forwarder.away()
            return
        if self._away_since_ms:
            self._away_since_ms = 0
            log.info("cluster_reachable")
            self._forwarder.back()
        if is_return:
            self._forwarder.try_now()
            if self.inner is not None:
                self.inner.try_now()


def _log_misplaced(address: str, why: str) -> None:
    log.error("cluster_endpoint_invalid", address=address, why=why)


def _adapter_of(config: DaemonConfig, clock: Clock, timeout_ms: int, told: Callable[..., None]) -> Cluster:
    """Return the client of the cluster: for its proxies, or for its name servers and brokers."""
    if config.broker == "rocketmq":
        endpoints = tuple(map(str, config.endpoints))
        proxies = RocketMQBroker(grpc_options(config, endpoints=endpoints, timeout_ms=timeout_ms), clock, told)
        proxies.watch()
        return proxies
    names = tuple(map(str, config.namesrv))
    classic = RemotingBroker(remoting_options(config, names=names, timeout_ms=timeout_ms), clock=clock, told=told)
    start = Start.FIRST_OFFSET if config.group_start == "earliest" else Start.LAST_OFFSET
    return LeasingBroker(classic, clock, LeasingOptions(start=start, timeout_ms=timeout_ms), reach=classic)
