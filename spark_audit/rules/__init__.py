"""Pure functions from tables to tables: what was lost, what was late, what does not add up."""

from __future__ import annotations
