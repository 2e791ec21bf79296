"""What a user installs: few base dependencies, and a wheel with everything the code reads at run time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOME = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]["custom"]["home"]
PACKAGES = ("dmq", "retry", "broker_adapter", "spark_audit")
NOT_SHIPPED = (
    "dmq/http2/_compiled/",
    "dmq/store/engines/memory.py",
    "dmq/http2/testing/",
)  # by-products; for tests and bench
# Nothing may be fetched: every way out leads to a closed port.
OFFLINE = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel as hatchling builds it from this source."""
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)],
        cwd=ROOT,
        env={**os.environ, **OFFLINE, "PIP_NO_INDEX": "1"},
        check=True,
        capture_output=True,
        timeout=50,
    )
    (built,) = target.glob("rock_dmq-*.whl")
    return zipfile.ZipFile(built)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return HeaderParser().parsestr(wheel.read(name).decode())


def source_files() -> set[str]:
    """Everything in the packages that is not a by-product."""
    return {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc" and not path.name.startswith(".")
        if not path.relative_to(ROOT).as_posix().startswith(NOT_SHIPPED)
    }


def test_the_hook_costs_two_dependencies(metadata: Message) -> None:
    requirements = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {re.split(r"[^\w.-]", line)[0] for line in requirements} == {"rocksdict", "structlog"}


def test_the_extras_are_those_that_are_documented(metadata: Message) -> None:
    extras = {
        "client",
        "daemon",
        "server",
        "classic",
        "replica",
        "audit",
        "audit-local",
        "demo",
        "http",
        "console",
        "otel",
    }
    assert set(metadata.get_all("Provides-Extra", [])) == extras


def test_only_demo_and_tests_get_the_official_client(metadata: Message) -> None:
    (line,) = [line for line in metadata.get_all("Requires-Dist", []) if line.startswith("rocketmq-python-client")]
    assert "extra == 'demo'" in line


def test_the_wheel_is_the_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == source_files()


def test_the_wheel_holds_the_wire_definitions_and_the_type_markers(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
    for suffix in (".proto", ".desc", ".pyi"):
        assert any(name.startswith("broker_adapter/wire/") and name.endswith(suffix) for name in names), suffix


def test_the_wheel_has_its_licence_and_its_command(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("/licenses/LICENSE") for name in wheel.namelist())
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "dmq = dmq.cli:main" in wheel.read(name).decode()


def test_an_index_can_show_the_readme(metadata: Message) -> None:
    """It is the long description, and each of its links is absolute and leads to what is there."""
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = str(metadata.get_payload())
    targets = re.findall(r"\]\(([^)\s]+)\)", page)
    paths = [target.removeprefix(f"{HOME}/").partition("/main/")[2].partition("#")[0] for target in targets]
    assert all(target.startswith((f"{HOME}/blob/main/", f"{HOME}/raw/main/")) for target in targets), targets
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    assert "![" in page
    assert all("/raw/main/" in target for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page))


def test_the_urls_of_the_project_are_in_one_place(metadata: Message) -> None:
    urls = dict(each.split(", ") for each in metadata.get_all("Project-URL", []))
    assert set(urls) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert all(url == HOME or url.startswith(f"{HOME}/") for url in urls.values())
    named = [path for path in ROOT.glob("*") if path.is_file() and HOME in path.read_text(encoding="utf-8")]
    assert named == [ROOT / "pyproject.toml"]
