"""Appearance of marks in charts and legends; the style sheet defines the colours for light, dark and print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MarkStyle:
    """Appearance of one kind of mark: a colour of the style sheet, the letter on it, and its meaning."""

    colour: str
    words: str
    letter: str = ""
    is_hatched: bool = False
    dash: Sequence[int] | None = None  # of a line

    @property
    def fill(self) -> str:
        """Colour, or the pattern of the page in that colour."""
        return f"url(#p-{self.colour})" if self.is_hatched else self.halo

    @property
    def ink(self) -> str:
        """Colour of a letter on the mark."""
        return f"var(--on-{self.colour})"

    @property
    def halo(self) -> str:
        """Outline colour that separates a letter from a pattern."""
        return f"var(--{self.colour})"
