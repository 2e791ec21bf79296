"""Host names in headers: valid forms and all others."""

from __future__ import annotations

import pytest

from dmq.runtime.hosts import host_of, is_origin_of

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("header", "host"),
    [
        ("127.0.0.1:8082", "127.0.0.1"),
        ("[::1]:8082", "::1"),
        ("Localhost", "Localhost"),
        ("", ""),
        ("[::1", None),
        ("[127.0.0.1", None),
        ("a b", None),
        ("attacker.example@127.0.0.1", None),
        ("127.0.0.1:port", None),
        ("127.0.0.1/", None),
        ("127.0.0.\u0661", None),
        ("127.0.0.1\n", None),
    ],
)
def test_a_host_is_a_name_or_an_address(header: str, host: str | None) -> None:
    """With an optional port; anything else is invalid."""
    assert host_of(header) == host


def test_an_origin_is_that_of_the_host_with_its_port() -> None:
    """Another port is another site."""
    assert is_origin_of("https://127.0.0.1:8082", "127.0.0.1:8082")
    for origin in ("https://127.0.0.1", "null", "", "http://[::1", "127.0.0.1:8082"):
        assert not is_origin_of(origin, "127.0.0.1:8082")
