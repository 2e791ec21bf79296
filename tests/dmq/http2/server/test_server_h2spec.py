"""h2spec, the conformance suite for HTTP/2, in front of our server: in plain text and over TLS."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import uvloop

from broker_adapter.runtime.clock import SystemClock
from dmq.http2 import Http2Server, make_context
from dmq.http2.testing.service import Service

pytestmark = pytest.mark.integration
MODULE = "github.com/summerwind/h2spec/cmd/h2spec@v2.2.1+incompatible"
CACHE = Path(__file__).parents[3] / "clients" / "go" / ".cache"
TESTS = 145
# Values are decoded when somebody asks for them; in these two cases nobody does.
EXPECTED_FAILURES = {
    "Sends a Huffman-encoded string literal representation with padding longer than 7 bits",
    "Sends a Huffman-encoded string literal representation padded by zero",
}


@pytest.fixture(scope="module")
def h2spec() -> Path:
    """The program, built when it is first needed; without Go a skip, in CI a failure."""
    program = CACHE / "h2spec"
    if program.exists():
        return program
    missing = "Go is not installed" if shutil.which("go") is None else ""
    if not missing:
        CACHE.mkdir(parents=True, exist_ok=True)
        (CACHE / ".gitignore").write_text("*\n", encoding="utf-8")
        environment = {**os.environ, "GOBIN": str(CACHE)}
        built = subprocess.run(
            ["go", "install", MODULE], env=environment, capture_output=True, text=True, check=False, timeout=240
        )
        missing = f"h2spec does not build: {built.stderr.strip()}" if built.returncode else ""
    if missing:
        assert not os.environ.get("CI"), f"required in CI: {missing}"
        pytest.skip(missing)
    return program


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for loopback, signed by itself, made now."""
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-out", path, "-keyout", path.with_suffix(".key")], check=True, capture_output=True)
    return path


async def run_suite(program: Path, certificate: Path | None) -> str:
    server = Http2Server(
        Service().methods,
        host="127.0.0.1",
        port=0,
        monotonic_s=SystemClock().monotonic_s,
        tls=None
        if certificate is None
        else lambda: make_context(str(certificate), str(certificate.with_suffix(".key"))),
    )
    port = await server.start()
    arguments = ["-h", "127.0.0.1", "-p", str(port), "-o", "2", "-P", "/t.T/Echo"]
    arguments += [] if certificate is None else ["-t", "-k"]
    process = await asyncio.create_subprocess_exec(program, *arguments, stdout=subprocess.PIPE)
    told, _ = await process.communicate()
    await server.stop(0)
    assert server.figures().held_bytes == 0
    return told.decode()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
def test_h2spec(h2spec: Path, certificate: Path, is_tls: bool) -> None:
    """All cases pass but the two that are named, at the first attempt."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        told = runner.run(run_suite(h2spec, certificate if is_tls else None))
    told = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", told)
    assert f"{TESTS} tests" in told
    assert "0 skipped" in told
    failures = told.partition("Failures:")[2]
    assert {line.strip() for line in re.findall("\u00d7 *[0-9]+: *(.*)", failures)} == EXPECTED_FAILURES, failures
