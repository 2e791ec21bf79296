"""One message: its rows in the files of a trail, what they say in plain words, and what became of it."""

from __future__ import annotations
