"""How marks look: in charts, in legends, and in the style sheet that has the colours for light, dark and paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Look:
    """How one kind of mark looks: a colour of the style sheet, the letter that stands on it; and what it means."""

    colour: str
    words: str
    letter: str = ""
    is_hatched: bool = False
    dash: Sequence[int] | None = None  # of a line

    @property
    def fill(self) -> str:
        """The colour, or the pattern of the page that is made of it."""
        return f"url(#p-{self.colour})" if self.is_hatched else self.halo

    @property
    def ink(self) -> str:
        """The colour of a letter on it."""
        return f"var(--on-{self.colour})"

    @property
    def halo(self) -> str:
        """What keeps a letter apart from a pattern."""
        return f"var(--{self.colour})"
