"""A wall clock that is set, for one process: a library that stands in front of ``clock_gettime``.

Only ``CLOCK_REALTIME`` is touched; the boot clock goes on, as it does when a host's clock is stepped. Needs a C
compiler: required in CI, a named skip elsewhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

/* WALL_SHIM names a file of eight bytes: by how many milliseconds the wall clock is ahead, read at every call. */
static volatile int64_t *ahead_ms;

static void open_shim(void)
{
    int fd = open(getenv("WALL_SHIM"), O_RDONLY);
    if (fd < 0) abort();
    ahead_ms = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
    if (ahead_ms == MAP_FAILED) abort();
}

int clock_gettime(clockid_t which, struct timespec *at)
{
    static int (*real)(clockid_t, struct timespec *);
    if (real == NULL) {
        open_shim();
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    }
    int failed = real(which, at);
    if (!failed && which == CLOCK_REALTIME) {
        int64_t total = at->tv_sec * 1000000000LL + at->tv_nsec + *ahead_ms * 1000000LL;
        at->tv_sec = total / 1000000000LL;
        at->tv_nsec = total % 1000000000LL;
    }
    return failed;
}
"""


class WallShim:
    """The library, and the file through which a test steps the clock of who runs under it."""

    def __init__(self, directory: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            if os.environ.get("CI"):
                pytest.fail("a C compiler is required in CI, for tests with a clock that is stepped")
            pytest.skip("no C compiler: the clock of a process cannot be stepped")
        source, self._library, self._ahead = (directory / name for name in ("wall.c", "wall.so", "ahead"))
        source.write_text(_SOURCE, encoding="utf-8")
        self.step(0)
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", str(self._library), str(source), "-ldl"], check=True, timeout=30
        )

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to be under it."""
        return {"LD_PRELOAD": str(self._library), "WALL_SHIM": str(self._ahead)}

    def step(self, ahead_ms: int) -> None:
        """Set the clock to be ahead of the host's by so much from here on."""
        if not self._ahead.exists():
            self._ahead.write_bytes(bytes(8))
        with self._ahead.open("r+b") as file:  # in place: the process has it mapped
            file.write(ahead_ms.to_bytes(8, "little", signed=True))
