"""The settings of the clients that a daemon uses in front of a cluster, from its configuration."""

from __future__ import annotations

from broker_adapter.remoting import RemotingOptions
from broker_adapter.rocketmq import ClusterOptions
from dmq.config.settings import DaemonConfig


def grpc_options(config: DaemonConfig, *, endpoints: tuple[str, ...], timeout_ms: int) -> ClusterOptions:
    """Return the settings of a client of proxies."""
    return ClusterOptions(
        endpoints=endpoints,
        access_key=config.cluster_access_key or "",
        secret_key=_secret(config),
        tls=config.cluster_tls,
        tls_ca=config.cluster_tls_ca,
        request_timeout_ms=timeout_ms,
        sends_max=1,  # each further one is told in the trail, so it is the lane's
    )


def remoting_options(config: DaemonConfig, *, names: tuple[str, ...], timeout_ms: int) -> RemotingOptions:
    """Return the settings of a client of name servers and brokers."""
    return RemotingOptions(
        names=names,
        access_key=config.cluster_access_key or "",
        secret_key=_secret(config),
        tls=config.cluster_tls,
        tls_ca=config.cluster_tls_ca,
        request_timeout_ms=timeout_ms,
    )


def _secret(config: DaemonConfig) -> str:
    return config.cluster_secret_key.get_secret_value() if config.cluster_secret_key is not None else ""
