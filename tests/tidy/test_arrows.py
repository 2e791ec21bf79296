"""The import contracts of pyproject.toml hold the layers of docs/explanation/architecture.md.

`make lint` runs the contracts over the real source; here they run over a house of empty modules, with one import too
many at a time.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.tidy

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = ROOT / "pyproject.toml"


def floors() -> dict[str, set[str]]:
    """The modules each package may have, by the contracts that list its floors."""
    config = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    return {
        package: {
            name.strip(" ()") for layer in contract["layers"] for name in layer.replace("|", ":").split(":") if name
        }
        for contract in config["tool"]["importlinter"]["contracts"]
        for package in contract.get("containers", [])
    }


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of the floors with nothing in the rooms, and the allowed imports of the libraries."""
    packages = {**floors(), "dmq.rocketmq_server": set[str](), "dmq.store.engines": {"rocks", "engine"}}
    for package, modules in packages.items():
        folder = tmp_path / package.replace(".", "/")
        folder.mkdir()
        (folder / "__init__.py").touch()
        for module in modules:
            if f"{package}.{module}" not in packages:
                (folder / f"{module}.py").touch()
    (tmp_path / "pyproject.toml").write_bytes(PYPROJECT.read_bytes())
    add(tmp_path, "dmq.store.engines.rocks", "import rocksdict")
    add(
        tmp_path,
        "dmq.rocketmq_server.server",
        "import grpc.aio\nimport grpc_health.v1.health\nimport dmq.store.engines.rocks",
    )
    add(tmp_path, "dmq.daemon.run", "import dmq.rocketmq_server.server")
    add(tmp_path, "dmq.cli", "import dmq.demo")
    add(tmp_path, "dmq.demo", "import rocketmq")
    add(tmp_path, "spark_audit.jobs", "import pyspark.sql")
    return tmp_path


def add(house: Path, module: str, code: str) -> None:
    with (house / module.replace(".", "/")).with_suffix(".py").open("a", encoding="utf-8") as file:
        file.write(f"{code}\n")


def lint(house: Path) -> subprocess.CompletedProcess[str]:
    run = "from importlinter.cli import lint_imports_command as main; main()"
    return subprocess.run(
        [sys.executable, "-c", run, "--no-cache", "--no-logo"],
        cwd=house,
        env={"PYTHONPATH": str(house), "PATH": "/usr/bin:/bin", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_drawn_house_stands(house: Path) -> None:
    result = lint(house)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    ("module", "code", "expected"),
    [
        ("broker_adapter.contracts", "import retry.policy", "broker_adapter is not allowed to import retry"),
        ("retry.policy", "import dmq.daemon", "retry is not allowed to import dmq"),
        ("dmq.daemon", "import spark_audit.schema", "dmq is not allowed to import spark_audit"),
        (
            "spark_audit.schema",
            "import broker_adapter.contracts.limits",
            "spark_audit is not allowed to import broker_adapter",
        ),
        ("dmq.store", "import dmq.scheduler", "dmq.store is not allowed to import dmq.scheduler"),
        (
            "dmq.store.schema.keys",
            "import dmq.store.engines",
            "dmq.store.schema is not allowed to import dmq.store.engines",
        ),
        (
            "dmq.store.schema.messages.record",
            "import dmq.store.schema.messages.index",
            "dmq.store.schema.messages.record is not allowed to import",
        ),
        ("dmq.producer_store", "import dmq.cluster", "dmq.producer_store is not allowed to import dmq.cluster"),
        ("dmq.daemon", "def f():\n    import dmq.cli", "dmq.daemon is not allowed to import dmq.cli"),
        ("dmq.daemon.server", "import dmq.daemon.opening", "dmq.daemon.server is not allowed to import"),
        (
            "broker_adapter.wire",
            "import broker_adapter.popping",
            "broker_adapter.wire is not allowed to import",
        ),
        ("retry.sink", "import retry.flow", "retry.sink is not allowed to import retry.flow"),
        ("spark_audit.schema", "import spark_audit.jobs", "spark_audit.schema is not allowed to import"),
        ("dmq.utils", "", "dmq.utils"),
        ("dmq.store.api", "import rocksdict", "dmq is not allowed to import rocksdict"),
        ("dmq.scheduler", "import rocksdict", "dmq is not allowed to import rocksdict"),
        ("dmq.broker", "import grpc", "dmq is not allowed to import grpc"),
        ("dmq.daemon", "import grpc.aio", "dmq is not allowed to import grpc"),
        ("retry.hook", "import grpc", "retry is not allowed to import grpc"),
        (
            "retry.hook.sending",
            "import retry.hook.metrics",
            "retry.hook.sending is not allowed to import retry.hook.metrics",
        ),
        ("dmq.trail", "import pyspark.sql", "dmq is not allowed to import pyspark"),
        ("dmq.rocketmq_server.server", "import rocketmq", "dmq is not allowed to import rocketmq"),
        ("broker_adapter.wire", "import grpc_tools.protoc", "broker_adapter is not allowed to import grpc_tools"),
    ],
)
def test_a_wrong_arrow_is_refused(house: Path, module: str, code: str, expected: str) -> None:
    path = (house / module.replace(".", "/")) / "__init__.py"
    add(house, f"{module}.__init__" if path.exists() else module, code)
    result = lint(house)
    assert result.returncode == 1, result.stdout + result.stderr
    assert expected in result.stdout
