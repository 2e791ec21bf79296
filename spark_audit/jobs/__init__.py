"""Audit runs: of a whole trail, or incremental."""

from __future__ import annotations
