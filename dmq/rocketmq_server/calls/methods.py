"""The RPCs on a daemon's client port: the public protocol, and the project's own consumer service."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from broker_adapter.wire import consumer_v1, rocketmq_v2
from broker_adapter.wire.pool import Method

# Keyed by name: a test ensures that no name is in both services.
METHODS: Final[Mapping[str, Method]] = MappingProxyType({**rocketmq_v2.METHODS, **consumer_v1.METHODS})
