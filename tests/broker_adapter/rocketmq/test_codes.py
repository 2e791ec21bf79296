"""The table from a proxy's codes to our errors: complete, and back again where the sidecar answers with them."""

from __future__ import annotations

import pytest

from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable, Overloaded, Refused
from broker_adapter.rocketmq.codes import KNOWN, check, error_of
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.rocketmq_server.codec.codes import CODES, status_of


@pytest.mark.parametrize("name", [name for name in wire.Code.keys() if name != "CODE_UNSPECIFIED"])  # noqa: SIM118
def test_every_code_has_an_error(name: str) -> None:
    """By name, not by its class."""
    assert wire.Code.Value(name) in KNOWN


@pytest.mark.parametrize("rule", list(CODES))
def test_a_refusal_goes_through_the_daemon_with_the_code_that_it_had(rule: object) -> None:
    """So clients behind a daemon see what they would see in front of the cluster."""
    code = CODES[rule]  # type: ignore[index]
    error = error_of(wire.Status(code=code, message="why"), "proxy:1")
    assert isinstance(error, Refused)
    assert status_of(error).code == code


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (wire.TOO_MANY_REQUESTS, Overloaded),
        (wire.INTERNAL_SERVER_ERROR, BrokerUnavailable),
        (wire.MASTER_PERSISTENCE_TIMEOUT, BrokerUnavailable),
        (40_999, Refused),
        (59_999, BrokerUnavailable),
        (0, BrokerUnavailable),
    ],
)
def test_codes_by_their_effect(code: int, kind: type[BrokerError]) -> None:
    """Nothing done, in doubt, refused; a code that nobody knows goes by its class."""
    error = error_of(wire.Status(code=code, message="why\n" * 1000), "proxy:1")  # type: ignore[arg-type]
    assert isinstance(error, kind)
    assert "proxy:1" in str(error)
    assert len(str(error)) < 600


def test_ok_is_no_error() -> None:
    """Nor does ``check`` raise."""
    check(wire.Status(code=wire.OK), "proxy:1")
