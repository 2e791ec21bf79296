"""The place of the demo's second copy: a server if versitygw is installed, otherwise a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmq.demo.second_copy import make_second_copy


def test_without_a_server_the_copy_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No program and no variable is needed, and the directory exists."""
    monkeypatch.setenv("PATH", str(tmp_path))
    copy = make_second_copy(tmp_path, 9000)
    assert (copy.url, copy.server, copy.environment) == (f"file://{tmp_path}/objects/demo", (), {})
    assert Path(copy.url.removeprefix("file://")).is_dir()
    assert copy.is_reachable()


def test_versitygw_in_the_path_serves_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables name the server at its port, which does not listen before the caller starts it."""
    program = tmp_path / "versitygw"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    copy = make_second_copy(tmp_path, 1)
    assert (copy.url, copy.server[0]) == ("s3://demo/store", str(program))
    assert copy.environment["AWS_ENDPOINT_URL"] == "http://127.0.0.1:1"
    assert not copy.is_reachable()
