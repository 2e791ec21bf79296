"""The package name ``retry`` is taken on PyPI too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_foreign_retry_package_is_refused_in_a_line(tmp_path: Path) -> None:
    """Importing dmq says what happened and what mends it, instead of failing later for a reason nobody can guess."""
    (tmp_path / "retry").mkdir()
    (tmp_path / "retry" / "__init__.py").write_text("def retry(): ...\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import dmq"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("ImportError: ")]
    assert "PyPI's package 'retry'" in said
    assert "pip install --force-reinstall --no-deps rock-dmq" in said
