"""A real daemon with messages in all states, its console, and a browser in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page
from support.rigs.daemon.consoles import Open, Site, console, fail, fill
from support.rigs.daemon.process import Daemon
from support.rigs.services.browsers import chromium


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A console of a daemon without access keys."""
    with Daemon(tmp_path_factory.mktemp("console") / "data", processes=1) as daemon:
        dead = fill(daemon.address)
        fail(daemon.address)
        with console(daemon.address) as url:
            yield Site(url, daemon, dead)


@pytest.fixture(scope="module")  # a running browser is a running event loop: no later test could start its own
def browser() -> Iterator[Browser]:
    """The system's Chromium."""
    with chromium() as launched:
        yield launched


@pytest.fixture
def opened(browser: Browser) -> Iterator[Open]:
    """Open a page in a window of its own; no page may break the policy, run into an error or load from elsewhere."""
    contexts: list[BrowserContext] = []
    wrong: list[str] = []

    def open_page(url: str, width: int = 1280, **options: Any) -> Page:  # noqa: ANN401 - playwright's own options
        own = "/".join(url.split("/")[:3]) + "/"
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda said: None if "status of" in said.text else wrong.append(f"console: {said.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
        page.on("request", lambda sent: None if sent.url.startswith(own) else wrong.append(f"request: {sent.url}"))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []
