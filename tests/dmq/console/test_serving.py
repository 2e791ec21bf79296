"""The console for other hosts: HTTPS, a sign-in, and no page without an access key."""

from __future__ import annotations

import os
import re
import ssl
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

import pytest
from support.rigs.daemon.acl import OPERATOR, Key, write_acl
from support.rigs.daemon.consoles import console
from support.rigs.daemon.process import START_S_MAX, Daemon, run_command

pytestmark = pytest.mark.integration


class Answer(NamedTuple):
    """A response of the console."""

    status: int
    headers: dict[str, str]
    text: str


class Browser:
    """A client that keeps the cookie of the console, and sends forms as its pages do."""

    def __init__(self, port: int, certificate: Path | None) -> None:
        self.host = f"127.0.0.1:{port}"
        self.cookie = ""
        self._tls = ssl.create_default_context(cafile=str(certificate)) if certificate is not None else None
        if self._tls is not None:
            self._tls.check_hostname = False

    def ask(self, method: str, path: str, body: str = "", **headers: str) -> Answer:
        """Send one request with the cookie."""
        connection: HTTPConnection = (
            HTTPSConnection(self.host, context=self._tls, timeout=START_S_MAX)
            if self._tls is not None
            else HTTPConnection(self.host, timeout=START_S_MAX)
        )
        try:
            connection.request(method, path, body or None, {"Cookie": self.cookie, **headers})
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            self.cookie = found.get("set-cookie", self.cookie).partition(";")[0]
            return Answer(answer.status, found, answer.read().decode())
        finally:
            connection.close()

    def sign_in(self, key: Key, origin: str = "") -> Answer:
        """Send the form of the page."""
        (token,) = re.findall(r'name="token" value="([^"]+)"', self.ask("GET", "/sign-in?next=/topics").text)
        fields = {"token": token, "access_key": key.access_key, "secret": key.secret_key, "next": "/topics"}
        return self.ask("POST", "/sign-in", urlencode(fields), Origin=origin or self.origin)

    @property
    def origin(self) -> str:
        """Origin of the pages."""
        return f"{'https' if self._tls is not None else 'http'}://{self.host}"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with access keys, whose console serves every address of this host."""
    home = tmp_path_factory.mktemp("external")
    env = {**os.environ, "DMQ_CONSOLE": "0.0.0.0:0", "DMQ_ACL": str(write_acl(home))}
    with Daemon(home / "data", env=env, processes=1) as daemon:
        daemon.wait_for("console_serving", timeout_s=START_S_MAX)
        yield daemon


@pytest.fixture
def browser(daemon: Daemon) -> Browser:
    """A browser that trusts the certificate of the daemon."""
    port = urlsplit(daemon.event("console_serving")["url"]).port
    assert port is not None
    return Browser(port, daemon.data / "tls" / "certificate.pem")


def test_no_page_is_shown_without_a_sign_in(browser: Browser) -> None:
    """Also no events; a wrong secret is refused."""
    for path in ("/", "/topics", "/message?topic=a&id=b"):
        answer = browser.ask("GET", path)
        assert (answer.status, answer.headers["location"].partition("=")[0]) == (303, "/sign-in?next"), path
    assert browser.ask("GET", "/events").status == 403
    assert browser.sign_in(OPERATOR._replace(secret_key="guessed")).status == 403
    assert browser.ask("GET", "/topics").status == 303
    assert browser.sign_in(OPERATOR).headers["location"] == "/topics"
    assert "Topics" in browser.ask("GET", "/topics").text


def test_guesses_are_bounded_also_in_parallel(daemon: Daemon) -> None:
    """By a console of its own, which forgets them; a right secret is not checked then, and an open session stays."""
    with console(daemon.address) as url:
        port = urlsplit(url).port
        assert port is not None
        known = Browser(port, None)
        assert known.sign_in(OPERATOR).status == 303

        def guess(number: int) -> int:
            return Browser(port, None).sign_in(OPERATOR._replace(secret_key=f"guess-{number}")).status

        with ThreadPoolExecutor(16) as pool:
            found = Counter(pool.map(guess, range(30)))
        assert found.keys() == {403, 429}
        assert 10 <= found[403] <= 15  # a few more than at once are allowed in the time that passed
        refused = Browser(port, None).sign_in(OPERATOR)
        assert (refused.status, 1 <= int(refused.headers["retry-after"]) <= 60) == (429, True)
        assert "Too many sign-ins were refused" in refused.text
        assert "Topics" in known.ask("GET", "/topics").text


def test_the_cookie_is_for_this_host_and_https_alone(browser: Browser) -> None:
    """Scripts cannot read it, other sites do not send it, and other hosts cannot set it."""
    written = browser.sign_in(OPERATOR).headers["set-cookie"]
    assert written.startswith("__Host-dmq_console_")
    assert {each.strip().lower() for each in written.split(";")[1:]} >= {
        *("secure", "httponly", "path=/", "samesite=strict")
    }


def test_a_form_of_a_page_without_https_is_refused(browser: Browser) -> None:
    """A page of the same host and port, and of another host."""
    for origin in (f"http://{browser.host}", "https://evil.example", "null"):
        assert browser.sign_in(OPERATOR, origin).status == 403
    assert browser.ask("GET", "/topics").status == 303


def test_a_command_refuses_to_serve_other_hosts_without_https_and_keys(daemon: Daemon, tmp_path: Path) -> None:
    """It names the option, or the setting of the daemon."""
    command = ("console", "--listen", "0.0.0.0:0", "--address")
    assert "--certificate" in run_command(*command, daemon.address).stderr
    with Daemon(tmp_path / "data", processes=1) as other:
        certificate = str(daemon.data / "tls" / "certificate.pem")
        refused = run_command(*command, other.address, "--certificate", certificate)
    assert (refused.returncode, "has no access keys" in refused.stderr) == (2, True), refused
