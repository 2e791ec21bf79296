"""Compile the HTTP/2 server with mypyc, into a folder beside its modules: docs/decisions/http2.md says why.

    python tools/compile_http2.py

It is also a hook of the wheel's build, which takes the compiled modules in if DMQ_COMPILED=1 is in the environment.
What is there already, of the same sources and for the same Python, is left as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the build of a wheel does not have the tree there

from dmq.runtime.compiled import DIGEST, SUFFIX, digest_of, folder_of, is_made_of, modules_of  # noqa: E402 - as above

PACKAGE = ROOT / "dmq" / "http2"
LIBRARY = "dmq.http2.all"  # the name of what the modules share, but for a suffix
_OUTPUT_CHARS_MAX = 4000


def compile_modules() -> Path | None:
    """Return the folder with the compiled modules; None if what compiles them is missing.

    Raises CalledProcessError if it is there and fails, RuntimeError if the sources change meanwhile.
    """
    folder, digest = folder_of(PACKAGE), digest_of(PACKAGE)
    if is_made_of(folder, PACKAGE):
        return folder
    if _missing():
        return None
    print("compiling dmq/http2 (half a minute)", flush=True)
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="new-", dir=folder.parent) as work:
        # In a process of its own: it takes the working directory, prints, and ends where it fails.
        command = [sys.executable, __file__, "build", work]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            print((done.stdout + done.stderr)[-_OUTPUT_CHARS_MAX:], file=sys.stderr)
            done.check_returncode()
        if digest_of(PACKAGE) != digest:  # then nobody knows what was compiled
            raise RuntimeError("dmq/http2 was edited while it was compiled: run it again")
        made = Path(work, "lib", "dmq", "http2")
        (made / DIGEST).write_text(digest, encoding="ascii")
        if not is_made_of(folder, PACKAGE):  # another one may have done it meanwhile, and its modules are in use
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    return folder


def _missing() -> str:
    """Say what is missing here to compile; empty if nothing is."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"a C compiler ({compiler})"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "the headers of Python (on Debian: python3-dev)"
    if not (find_spec("mypyc") and find_spec("setuptools")):
        return "mypy or setuptools (locks/compile.txt, locks/build.txt)"
    return ""


def _build(work: str) -> None:
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    modules = [str(each.relative_to(ROOT)) for each in modules_of(PACKAGE) if each.name != "__init__.py"]
    config = Path(work, "mypy.ini")  # without the package dmq itself, which imports the whole tree
    config.write_text("[mypy]\n[mypy-dmq]\nfollow_imports = skip\n", encoding="ascii")
    options = [f"--config-file={config}", "--ignore-missing-imports", "--follow-imports=silent", "--no-incremental"]
    extensions = mypycify([*options, *modules], opt_level="3", group_name=LIBRARY, target_dir=f"{work}/c")
    command = build_ext(Distribution({"name": "rock-dmq", "ext_modules": extensions}))
    command.build_lib, command.build_temp, command.parallel = f"{work}/lib", f"{work}/temp", os.cpu_count()
    command.ensure_finalized()
    command.run()


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]  # of no use here
    """Called by hatchling, under this name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Take the compiled modules into a wheel, if they are asked for."""
        if version != "standard" or os.environ.get("DMQ_COMPILED") != "1":
            return
        folder = compile_modules()
        if folder is None:
            raise RuntimeError(
                f"DMQ_COMPILED=1 asks for compiled modules, and {_missing()} is missing here: "
                "install it, or build without DMQ_COMPILED"
            )
        for each in (*folder.rglob(f"*{SUFFIX}"), folder / DIGEST):
            build_data["force_include"][str(each)] = str(each.relative_to(ROOT))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def main() -> int:
    """Compile, and say so if that cannot be: nothing needs it. Only in CI a compiler that fails is a failure."""
    without = "dmq/http2 will run as Python, and take more of a processor"
    try:
        if compile_modules() is None:
            print(f"{_missing()} is missing here: {without}")
    except subprocess.CalledProcessError:
        print(f"the compiler failed, as shown above: {without}")
        return 1 if os.environ.get("CI") else 0
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["build"]:
        _build(sys.argv[2])
    else:
        sys.exit(main())
