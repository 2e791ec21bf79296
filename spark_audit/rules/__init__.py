"""Pure functions from tables to tables that detect lost, late and inconsistent messages."""

from __future__ import annotations
