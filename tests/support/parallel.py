"""How ``pytest -n`` spreads the tests over its workers.

A unit of work is a module of tests, since its daemons and clients are made once for all of its tests; modules that
share a Spark session are one unit, and so are the tests, of whatever module, that share a cluster. Units are handed out
as workers become free, those that take longest first: one of them at the end would let all others wait.
"""

from __future__ import annotations

import os

import pytest
from support.effort import EFFORT
from xdist.scheduler import LoadScopeScheduling

WORKERS_MAX = 16
_REAL_TIME = "tests/broker_adapter/contracts/test_adapter_in_real_time.py"
CLUSTER_5, CLUSTER_4 = "cluster of RocketMQ 5", "cluster of RocketMQ 4"
_SESSION = "session of Spark"  # of a long run, in which all audits are made on Spark too: it takes seconds to start
_LONGEST = (
    _SESSION,
    CLUSTER_5,
    "tests/dmq/console/test_app_in_browser.py",
    "tests/system/test_alerts.py",
    "tests/dmq/console/test_app_operators_in_browser.py",
    "tests/dmq/console/test_app_messages_in_browser.py",
    "tests/spark_audit/report/test_html_in_browser.py",
    CLUSTER_4,
    "tests/dmq/daemon/replica/test_replica_takeover.py",
    "tests/spark_audit/test_engines.py",
    "tests/system/test_pages.py",
    "tests/dmq/daemon/replica/test_replica_linearizability.py",
    "tests/spark_audit/jobs/test_audit_incremental.py",
    "tests/system/clients/test_takeover.py",
    "tests/dmq/daemon/cluster/test_cluster.py",
    "tests/system/test_clock_steps.py",
    "tests/dmq/daemon/replica/test_replica_turmoil.py",
    "tests/dmq/http_api/test_openapi.py",
    "tests/dmq/runtime/test_compiled.py",
    "tests/system/clients/test_recall.py",
    "tests/retry/test_hook_outage.py",
    "tests/dmq/rocketmq_server/transport/test_http2_server_admission.py",
    "tests/spark_audit/jobs/test_audit_of_retired_cells.py",
    "tests/system/clients/test_clients.py",
    "tests/system/clients/test_restart.py",
)


def worker() -> int:
    """Return the number of this process among the workers, 0 if it is the only one."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS_MAX


def is_controller(config: pytest.Config) -> bool:
    """Say whether this process hands out tests and runs none."""
    return config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")


def by_length(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests with the longest units first, the others and those of a unit as they were."""
    rank = {unit: place for place, unit in enumerate(_LONGEST)}
    return sorted(items, key=lambda item: rank.get(_unit_of(item.nodeid), len(rank)))


def ends_cluster(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Say whether a test is the last one of a cluster's that this process runs."""
    unit = _unit_of(item.nodeid)
    return unit in {CLUSTER_5, CLUSTER_4} and (nextitem is None or _unit_of(nextitem.nodeid) != unit)


class ByUnit(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Hands out whole units, in the order of their first tests."""

    def _split_scope(self, nodeid: str) -> str:
        return _unit_of(nodeid)


def _unit_of(test: str) -> str:
    module, _, name = test.partition("::")
    if module == _REAL_TIME:
        clusters = {"[leased_4]": CLUSTER_4, "[leased_5]": CLUSTER_5, "[rocketmq]": CLUSTER_5}
        return clusters.get(name[name.rfind("[") :], module)
    if "_on_rocketmq" in module:
        return CLUSTER_4 if module.endswith("_4.py") or name.endswith("[4]") else CLUSTER_5
    return _SESSION if EFFORT > 1 and module.startswith("tests/spark_audit/") else module
