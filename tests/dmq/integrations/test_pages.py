"""Pages of a process without a web server, and clients that would keep them from others."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest

from dmq.integrations import pages
from dmq.integrations.pages import ProbePage, served

_PAGES = {"/health": lambda: ProbePage(503, "application/json", '{"billing": ["it is stopping"]}')}


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_page_and_no_page(host: str) -> None:
    """With its status and its kind; a path that is none says which there are."""
    with served(f"{host}:0", _PAGES) as port:
        for path, status, text in (
            ("/health?x", 503, '{"billing": ["it is stopping"]}'),
            ("/", 404, "there are /health\n"),
        ):
            with pytest.raises(urllib.error.HTTPError) as answered:
                urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=30)
            with answered.value as answer:
                assert (answer.code, answer.read().decode()) == (status, text)


def test_a_silent_client_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one is served."""
    monkeypatch.setattr(pages, "REQUEST_S_MAX", 0.1)
    with served("127.0.0.1:0", _PAGES) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as silent:
            silent.sendall(b"GET /hea")
            assert b"200" not in silent.recv(1000)
        with pytest.raises(urllib.error.HTTPError) as answered:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30)
        answered.value.close()
