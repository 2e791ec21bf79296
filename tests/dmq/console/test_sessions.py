"""Sessions of browsers: those without an access key need no memory, and none of them can be made up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from broker_adapter.runtime.clock import ManualClock
from broker_adapter.wire.signature import Signer
from dmq.admin.client import AdminClient
from dmq.console.sessions import IDLE_S_MAX, SESSIONS_MAX, BrowserSessions

pytestmark = pytest.mark.unit


def connect(signer: Signer | None, why: str) -> AdminClient:
    """Return a client, which connects at its first call."""
    return AdminClient("127.0.0.1:1", signer=signer, why=why)


@pytest.fixture
def sessions() -> Iterator[BrowserSessions]:
    """Sessions of one console."""
    made = BrowserSessions(connect, ManualClock())
    yield made
    made.unsigned.close()


def test_many_browsers_without_a_key_end_no_other_session(sessions: BrowserSessions) -> None:
    """A stranger who opens pages without end neither signs a person out, nor ends the form of a sign-in."""
    person, form = sessions.start("shop", "secret"), sessions.start()
    for _ in range(2 * SESSIONS_MAX):
        sessions.start()
    assert (sessions.find(person.cookie), sessions.find(form.cookie)) == (person, form)
    sessions.end(person)
    assert sessions.find(person.cookie) is None


def test_cookies_and_tokens_are_of_this_process(sessions: BrowserSessions) -> None:
    """Each session has its own ones; a changed one, and one of another console, is none."""
    first, second, other = sessions.start(), sessions.start(), BrowserSessions(connect).start()
    assert len({first.cookie, second.cookie, first.form_token, second.form_token}) == 4
    nonce, _, code = first.cookie.partition(".")
    stolen = f"{second.cookie.partition('.')[0]}.{code}"
    for cookie in (
        "",
        ".",
        nonce,
        f"{nonce}.",
        f"{nonce}.{first.form_token}",
        stolen,
        other.cookie,
        first.cookie + "\xe9",
    ):
        assert sessions.find(cookie) is None, cookie


def test_a_session_with_a_key_ends_after_a_time_without_use() -> None:
    """Its cookie leads to nothing then."""
    clock = ManualClock()
    sessions = BrowserSessions(connect, clock)
    person = sessions.start("shop", "secret")
    clock.advance(int(IDLE_S_MAX * 1000))
    assert sessions.find(person.cookie) == person
    clock.advance(int(IDLE_S_MAX * 1000) + 1)
    assert sessions.find(person.cookie) is None
