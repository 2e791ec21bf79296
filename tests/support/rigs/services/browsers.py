"""The system's Chromium: required in CI, a named skip elsewhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run Chromium. A running browser is a running event loop: its thread cannot start another one meanwhile."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("Chromium is required in CI, for tests that look at pages: make chromium")
        pytest.skip("no Chromium: pages cannot be looked at")
    with sync_playwright() as playwright:
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        launched = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"] if root else []
        )
        yield launched
        launched.close()
