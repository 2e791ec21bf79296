"""What Python and the C library are told in a process that passes many messages on."""

from __future__ import annotations

import ctypes
import gc
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_FREED_BYTES_KEPT: Final = 64 * 2**20
_REQUEST_BYTES: Final = 16 * 2**20  # what is larger goes back to the system at once


def tune() -> None:
    """Do so; call it once everything is imported."""
    _keep_freed_memory()
    # Messages are tuples and bytes without cycles: looking for some every 700 objects costs a tenth of a burst's
    # and of a send's time. Every 5,000 it is 1 % of 256 sends in flight, and a millisecond at once; with 50,000
    # nothing, but ten milliseconds each time while clients come and many objects are new.
    gc.freeze()
    gc.set_threshold(5_000, 1, 10_000)


def _keep_freed_memory() -> None:
    """Have the C library keep some of what was freed: to fetch a large request's pages anew costs milliseconds."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc's, with the numbers of its malloc.h
        mallopt(_M_TRIM_THRESHOLD, _FREED_BYTES_KEPT)
        mallopt(_M_MMAP_THRESHOLD, _REQUEST_BYTES)
