"""A front as a process of its own."""

from __future__ import annotations

import re

import pytest
from support.rigs.fronts.process import front_process, front_settings

from dmq.processes import frames

pytestmark = pytest.mark.integration

# What the store process has, and what draws: together they were two thirds of a front's start.
NEEDLESS = re.compile(
    r"(rocksdict|grpc\w*|prometheus_client|pydantic|numpy|pyarrow)(\.|$)|rich\."  # rich is kept out
    r"|dmq\.(store\.(?!schema)|store\.schema\.(?!operators(\.limits)?$)|trail|scheduler|daemon|rocketmq_server\.rpc\.service"
    r"|broker"
    r"|metrics\.registry|config\.settings|admin\.(?!api$|api\.access$|admin_v1$))"
)


def test_a_front_imports_only_the_modules_it_serves_with() -> None:
    """A front is started again while its clients wait, so that it is quick; measured by modules, not by seconds."""
    with front_process("-X", "importtime") as front:
        assert isinstance(front.batch()[0], frames.Hello)
        front.tell(frames.Welcome(front_settings()))
        assert frames.Ready() in front.batch()
        assert front.ends() == 0
        log = front.log()
    loaded = {line.rpartition("|")[2].strip() for line in log.splitlines() if line.startswith("import time:")}
    assert {"dmq.processes.link", "dmq.rocketmq_server.rpc.messages", "structlog", "uvloop"} <= loaded
    assert sorted(filter(NEEDLESS.match, loaded)) == []
