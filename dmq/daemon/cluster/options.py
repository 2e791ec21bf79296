"""Settings of the clients of a cluster, derived from the configuration of the daemon."""

from __future__ import annotations

from broker_adapter.remoting import RemotingOptions
from broker_adapter.rocketmq import ClusterOptions
from dmq.config.settings import DaemonConfig


def grpc_options(config: DaemonConfig, *, endpoints: tuple[str, ...], timeout_ms: int) -> ClusterOptions:
    """Return the settings of a client for proxies."""
    return ClusterOptions(
        endpoints=endpoints,
        access_key=config.cluster_access_key or "",
        secret_key=_secret(config),
        tls=config.cluster_tls,
        tls_ca=config.cluster_tls_ca,
        request_timeout_ms=timeout_ms,
        sends_max=1,  # the lane repeats sends itself, because the trail records each attempt
    )


def remoting_options(config: DaemonConfig, *, names: tuple[str, ...], timeout_ms: int) -> RemotingOptions:
    """Return the settings of a client for name servers and brokers."""
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
