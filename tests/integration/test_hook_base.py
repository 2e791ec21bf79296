"""The hook needs the base distribution and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
ALLOWED = {allowed!r}

class Nothing:
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package not in sys.stdlib_module_names and package not in ALLOWED:
            raise ImportError(f"{{name}} is not in the base distribution")

sys.meta_path.insert(0, Nothing())
from dmq import Spool, durable
from retry import Redelivery, Spooled

def away(payload):
    raise ConnectionError("away")

redelivery = Redelivery(Spool({root!r}))
redelivery.add_handler("orders", away)
assert isinstance(redelivery.send("orders", b"1", key="k"), Spooled)
print(redelivery.close().still_waiting)
"""


def test_the_hook_needs_the_base_distribution_only(tmp_path: Path) -> None:
    """Everything else is refused at import, as if it were not installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    base = {re.split(r"[<>=]", each)[0] for each in project["dependencies"]}
    assert base == {"rocksdict", "structlog"}
    allowed = base | {"dmq", "retry", "broker_adapter", "spark_audit"}
    program = PROGRAM.format(allowed=allowed, root=str(tmp_path / "spool"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.stdout.strip()[-1:], done.returncode) == ("1", 0), done.stderr
