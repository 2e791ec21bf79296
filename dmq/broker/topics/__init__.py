"""Topics and consumer groups: their names, numeric ids and settings.

Imports: ``dmq.broker.io``, ``dmq.store`` and below. Interface: the registry, the catalog, topic settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_adapter.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from dmq.broker.topics.catalog import (
        AUTO_CREATE,
        DEFAULT_POLICY,
        LIMITS_DEFAULT,
        QUEUES_DEFAULT,
        AutoCreate,
        Catalog,
        ScheduleLimits,
        check_not_forwarder,
    )
    from dmq.broker.topics.part import BrokerPart, SharedParts
    from dmq.broker.topics.registry import FORWARDER_GROUP, Group, Names, Topic
    from dmq.broker.topics.settings import (
        FLOW_STAYS,
        INDEX_STAYS,
        KEEP_STAYS,
        QUOTAS_STAY,
        FlowChange,
        IndexChange,
        KeepChange,
        QuotaChange,
        paused_since,
    )

__all__ = [
    "AUTO_CREATE",
    "DEFAULT_POLICY",
    "FLOW_STAYS",
    "FORWARDER_GROUP",
    "INDEX_STAYS",
    "KEEP_STAYS",
    "LIMITS_DEFAULT",
    "QUEUES_DEFAULT",
    "QUOTAS_STAY",
    "AutoCreate",
    "BrokerPart",
    "Catalog",
    "FlowChange",
    "Group",
    "IndexChange",
    "KeepChange",
    "Names",
    "QuotaChange",
    "ScheduleLimits",
    "SharedParts",
    "Topic",
    "check_not_forwarder",
    "paused_since",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "dmq.broker.topics.catalog": (
            "AUTO_CREATE AutoCreate Catalog DEFAULT_POLICY LIMITS_DEFAULT QUEUES_DEFAULT ScheduleLimits "
            "check_not_forwarder"
        ),
        "dmq.broker.topics.part": "BrokerPart SharedParts",
        "dmq.broker.topics.registry": "FORWARDER_GROUP Group Names Topic",
        "dmq.broker.topics.settings": (
            "FLOW_STAYS FlowChange INDEX_STAYS IndexChange KEEP_STAYS KeepChange QUOTAS_STAY QuotaChange paused_since"
        ),
    },
)
