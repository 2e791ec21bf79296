"""History of one message: its rows in the files of a trail, their description, and its outcomes."""

from __future__ import annotations
