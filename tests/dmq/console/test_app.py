"""The console over plain HTTP: requests that a browser does not send, or that another site makes it send."""

from __future__ import annotations

import http.client
import re
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

import pytest
from support.rigs.daemon.consoles import GROUP, TOPIC, Site, console

from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient

pytestmark = pytest.mark.integration


class Answer(NamedTuple):
    """A response of the console."""

    status: int
    headers: dict[str, str]
    text: str


def ask(url: str, method: str, path: str, body: str = "", **headers: str) -> Answer:
    """Send one request, with ``Host`` or ``Origin`` as given."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        connection.request(method, path, body or None, {name.title(): value for name, value in headers.items()})
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, found, answer.read().decode())
    finally:
        connection.close()


@pytest.fixture
def form(site: Site) -> dict[str, str]:
    """A session and the fields of a valid redrive."""
    page = ask(site.url, "GET", f"/letter?group={GROUP}&id={site.dead[0]}")
    (token,) = set(re.findall(r'name="token" value="([^"]+)"', page.text))
    return {"cookie": page.headers["set-cookie"].partition(";")[0], "token": token, "origin": site.url.rstrip("/")}


def redrive(url: str, message_id: str, form: dict[str, str]) -> Answer:
    """Send the form."""
    body = urlencode({"group": GROUP, "id": message_id, "token": form.get("token", "")})
    headers = {name: form[name] for name in ("cookie", "origin") if name in form}
    return ask(url, "POST", "/redrive", body, **headers)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"token": ""}, "no valid token"),
        ({"token": "x" * 43}, "no valid token"),
        ({"origin": "http://evil.example"}, "another site"),
        ({"origin": "null"}, "another site"),
        ({"cookie": ""}, "session has ended"),
        ({"cookie": "dmq_console=guessed"}, "session has ended"),
    ],
)
def test_a_form_of_another_site_changes_nothing(
    site: Site, form: dict[str, str], changes: dict[str, str], why: str
) -> None:
    """Without the token, the origin and the cookie of one session a redrive is refused."""
    answer = redrive(site.url, site.dead[0], {**form, **changes})
    assert (answer.status, why in answer.text) == (403, True)
    assert outcome_of(site) == ""


def test_no_link_changes_anything(site: Site, form: dict[str, str]) -> None:
    """The addresses of forms do not accept GET, and a read-only console no form."""
    query = urlencode({"group": GROUP, "id": site.dead[0], "token": form["token"]})
    for path in ("/redrive", "/sign-out", "/audit/run"):
        assert ask(site.url, "GET", f"{path}?{query}", cookie=form["cookie"]).status == 405
    with console(site.daemon.address, "--read-only") as url:
        page = ask(url, "GET", f"/letter?group={GROUP}&id={site.dead[0]}")
        assert "/redrive" not in page.text
        assert redrive(url, site.dead[0], form).status == 403
    assert outcome_of(site) == ""


@pytest.mark.parametrize(
    ("path", "fields", "status", "text"),
    [
        ("/message", {"topic": TOPIC, "id": "x", "change": "drop"}, 400, "expected cancel, fire, reschedule"),
        ("/message", {"topic": TOPIC, "id": "x", "change": "reschedule", "at": "soon"}, 400, "invalid delivery time"),
        ("/messages", {"topic": TOPIC, "change": "cancel"}, 400, "no message is chosen"),
        ("/messages", {"topic": TOPIC, "change": "drop", "entry": "x"}, 400, "expected cancel, fire, reschedule"),
        ("/retries", {"group": GROUP, "change": "run-now"}, 400, "no retry is chosen"),
        ("/retries", {"group": GROUP, "change": "drop", "entry": "x"}, 400, "expected run-now or to-dead"),
        ("/bulk", {"group": GROUP, "kind": "purge"}, 400, "needs a reason"),
        ("/bulk", {"group": GROUP, "kind": "redrive", "rate": "fast"}, 400, "invalid rate"),
        ("/bulk", {"group": GROUP, "kind": "redrive", "count": "1001"}, 400, "type the name of the group, billing"),
        ("/bulk-change", {"topic": TOPIC, "change": "drop"}, 400, "expected cancel, fire, reschedule, move"),
        ("/bulk-change", {"topic": TOPIC, "change": "reschedule", "value": "soon"}, 400, "invalid time"),
        ("/bulk-change", {"topic": TOPIC, "change": "move", "value": "2030-01-01T00:00:00Z"}, 400, "invalid offset"),
        ("/bulk-change", {"topic": TOPIC, "change": "cancel", "rate": "fast"}, 400, "invalid rate"),
        ("/bulk-change", {"topic": TOPIC, "count": "1001"}, 400, "type the name of the topic, orders"),
        ("/bulk-change", {"topic": "nothing", "change": "cancel"}, 404, "nothing"),
        ("/message-job", {"id": "99", "change": "stop"}, 404, "no job has this number"),
        ("/message-job", {"id": "1", "change": "drop"}, 400, "expected stop or resume"),
        ("/job", {"id": "99", "change": "stop"}, 404, "no job has this number"),
        ("/job", {"id": "1", "change": "drop"}, 400, "expected stop or resume"),
    ],
)
def test_an_invalid_change_is_explained(
    site: Site, form: dict[str, str], path: str, fields: dict[str, str], status: int, text: str
) -> None:
    """Nothing is done; the answer names the value and the allowed ones."""
    headers = {"cookie": form["cookie"], "origin": form["origin"]}
    answer = ask(site.url, "POST", path, urlencode({**fields, "token": form["token"]}), **headers)
    assert (answer.status, text in answer.text) == (status, True), answer.text


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:80", "10.0.0.1", "", "[::1", "attacker.example@127.0.0.1"]
)
def test_another_host_name_is_refused(site: Site, host: str) -> None:
    """A name of another site that resolves to this host reads nothing."""
    answer = ask(site.url, "GET", "/topics", host=host)
    assert (answer.status, "orders" in answer.text) == (421, False)


def test_no_address_leads_to_another_host(site: Site) -> None:
    """A slash too many is an unknown page; a live page is named by its path alone."""
    answer = ask(site.url, "GET", "/topics/")
    assert (answer.status, "location" in answer.headers) == (404, False)
    assert ask(site.url, "GET", "/events/screen?at=//[").status == 404


@pytest.mark.parametrize("path", ["/", "/topics", "/nothing", "/static/console.js", "/static/nothing", "/redrive"])
def test_each_response_has_the_policy(site: Site, path: str) -> None:
    """Nothing inline and nothing from elsewhere, also on errors."""
    answer = ask(site.url, "GET", path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<script>|<style>|\sstyle=|\son\w+=", answer.text) or path.startswith("/static")


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/messages?topic=nothing", 404, "There is no topic nothing"),
        ("/messages?topic=order", 404, "did you mean orders?"),
        ("/message?topic=orders&id=nope", 200, "ended longer ago than is remembered"),
        ("/messages?topic=orders&q=state:lost", 400, "position 7: unknown state"),
        ("/messages?topic=orders&q=due-after:soon", 400, "not a time"),
        ("/bulk?group=billing&kind=drop", 400, "expected redrive or purge"),
        ("/bulk?group=billing&error=Unknown", 404, "no dead letter with this error"),
        ("/job?id=99", 404, "not among the 100 newest jobs"),
        ("/message-job?id=99", 404, "not among the 100 newest jobs"),
        ("/bulk-change?topic=nothing", 404, "nothing"),
        ("/bulk-change?topic=orders&q=state:queued", 400, "only pending messages can be changed"),
        ("/bulk-change?topic=orders&q=tagg:x", 400, "position 1: unknown word"),
        ("/retries?group=nothing", 404, "nothing"),
        ("/messages?topic=orders&token=%00", 400, ""),
        ("/dead?group=billing&reason=bad", 400, "expected one of sent_here"),
        ("/letter?group=billing&id=unknown", 404, "not a dead letter"),
        ("/message?topic=orders", 400, ""),
        ("/nothing", 404, "no such page"),
    ],
)
def test_a_wrong_address_is_explained(site: Site, path: str, status: int, text: str) -> None:
    """With the value and the allowed ones."""
    answer = ask(site.url, "GET", path)
    assert (answer.status, text in answer.text) == (status, True), answer.text


def outcome_of(site: Site) -> str:
    """Return the outcome of the first dead letter."""
    with AdminClient(site.daemon.address) as client:
        chosen = wire.DeadFilter(message_ids=[site.dead[0]])
        return str(client.dead_letters(GROUP, chosen, with_outcome=True).letters[0].outcome)
