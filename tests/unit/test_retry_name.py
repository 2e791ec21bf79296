"""The package name ``retry`` is taken on PyPI too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_foreign_retry_package_is_refused_by_name(tmp_path: Path) -> None:
    """Importing dmq says which package is in the way, instead of failing later for a reason nobody can guess."""
    (tmp_path / "retry").mkdir()
    (tmp_path / "retry" / "__init__.py").write_text("def retry(): ...\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import dmq"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "another distribution" in done.stderr
    assert str(tmp_path) in done.stderr
