"""A disk that is slow, or fails, for one process: a library that stands in front of ``fdatasync`` and ``fsync``.

Only syncs of write-ahead logs (``*.log``) are touched. Needs a C compiler: required in CI, a named skip elsewhere.
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
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Looked at per call, so that a test may change its mind: SHIM_DIR/slow holds milliseconds, SHIM_DIR/fail makes every
   sync fail. Each sync of a log leaves a byte in SHIM_DIR/syncs: "s" done, "f" failed. */
static int around(int fd, const char *name)
{
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    char link[64], path[4096], at[4096];
    const char *directory = getenv("SHIM_DIR");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 4 || directory == NULL || strncmp(path + length - 4, ".log", 4) != 0)
        return real(fd);
    snprintf(at, sizeof at, "%s/slow", directory);
    FILE *slow = fopen(at, "r");
    long milliseconds = 0;
    if (slow != NULL) {
        if (fscanf(slow, "%ld", &milliseconds) != 1) milliseconds = 0;
        fclose(slow);
    }
    struct timespec nap = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    nanosleep(&nap, NULL);
    snprintf(at, sizeof at, "%s/fail", directory);
    int fails = access(at, F_OK) == 0;
    snprintf(at, sizeof at, "%s/syncs", directory);
    int seen = open(at, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (seen >= 0) {
        if (write(seen, fails ? "f" : "s", 1) != 1) abort();
        close(seen);
    }
    if (fails) {
        errno = EIO;
        return -1;
    }
    return real(fd);
}

int fdatasync(int fd) { return around(fd, "fdatasync"); }
int fsync(int fd) { return around(fd, "fsync"); }
"""


class Shim:
    """The library, and the folder through which a test talks to it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            if os.environ.get("CI"):
                pytest.fail("a C compiler is required in CI, for tests with a slow or failing disk")
            pytest.skip("no C compiler: the disk cannot be made slow or failing")
        source, self._library = directory / "shim.c", directory / "shim.so"
        source.write_text(_SOURCE, encoding="utf-8")
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", str(self._library), str(source), "-ldl"], check=True, timeout=30
        )

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to be under it."""
        return {"LD_PRELOAD": str(self._library), "SHIM_DIR": str(self._directory)}

    def fail(self) -> None:
        """Make every sync of a log fail from here on."""
        (self._directory / "fail").touch()

    def syncs(self) -> str:
        """A letter for each sync of a log so far: ``s`` done, ``f`` failed."""
        seen = self._directory / "syncs"
        return seen.read_text(encoding="ascii") if seen.exists() else ""
