"""The audit as a whole: in one go, or by what is new."""

from __future__ import annotations
