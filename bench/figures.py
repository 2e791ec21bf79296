"""What a figure is: measured values, a goal, something beside it; and how figures are shown and kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from rich.table import Table

STEADY_SPREAD = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A bound for the median value, or for its ratio to what stands beside it."""

    sign: Literal["<=", ">="]
    bound: float
    of: Literal["value", "ratio"] = "value"

    def is_met_by(self, value: float) -> bool:
        """Say whether ``value`` is on the right side."""
        return value <= self.bound if self.sign == "<=" else value >= self.bound

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:.0%}" if self.of == "ratio" else f"{self.sign} {number(self.bound)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """The floor or the peer, measured in the same rounds."""

    what: str
    rounds: Sequence[float]

    def plain(self) -> dict[str, object]:
        """Return what JSON keeps."""
        return {
            "what": self.what,
            "value": median(self.rounds),
            "min": min(self.rounds),
            "max": max(self.rounds),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table; ``rounds`` holds one value per round.

    The goal's ratio and ``is_steady`` look at ``beside``; ``also`` holds what else is worth comparing.
    Of a difference, whose rounds scatter around zero, only what stands beside it can be steady.
    """

    name: str
    what: str
    unit: str
    rounds: Sequence[float]
    goal: Goal | None = None
    beside: Beside | None = None
    also: Sequence[Beside] = ()
    is_difference: bool = False
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The median of the rounds."""
        return median(self.rounds)

    @property
    def ratio(self) -> float | None:
        """How it compares with what stands beside it."""
        if self.beside is None:
            return None
        floor = median(self.beside.rounds)
        return self.value / floor if floor else None

    @property
    def is_steady(self) -> bool:
        """Whether the rounds agree. Where they do not, the machine was busy: median, ratio and goal say little."""
        measured = [] if self.is_difference else [self.rounds]
        if self.beside is not None:
            measured.append(self.beside.rounds)
        return all(max(rounds) <= STEADY_SPREAD * min(rounds) for rounds in measured)

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is met; ``None`` without a goal."""
        if self.goal is None:
            return None
        if self.goal.of == "value":
            return self.goal.is_met_by(self.value)
        return self.ratio is not None and self.goal.is_met_by(self.ratio)

    def plain(self) -> dict[str, object]:
        """Return what JSON keeps."""
        return {
            "name": self.name,
            "what": self.what,
            "unit": self.unit,
            "value": self.value,
            "min": min(self.rounds),
            "max": max(self.rounds),
            "rounds": list(self.rounds),
            "beside": None if self.beside is None else self.beside.plain(),
            "also": [each.plain() for each in self.also],
            "ratio": self.ratio,
            "is_steady": self.is_steady,
            "goal": None if self.goal is None else str(self.goal),
            "bound": self.goal.bound if self.goal is not None and self.goal.of == "value" else None,
            "is_met": self.is_met,
            "details": dict(self.details),
        }


def table_of(figures: Sequence[Figure]) -> Table:
    """Return the figures as a table."""
    table = Table(title="Rock-DMQ, measured", title_justify="left")
    table.add_column("figure", no_wrap=True)
    for heading in ("median", "min .. max", "unit", "floor or peer", "ratio", "goal", "met", "rounds"):
        is_text = heading in {"unit", "met", "rounds"}
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=heading == "goal")
    for figure in figures:
        beside = [*([] if figure.beside is None else [figure.beside]), *figure.also]
        table.add_row(
            figure.name,
            number(figure.value),
            _range(figure.rounds),
            figure.unit,
            "\n".join(f"{each.what}: {number(median(each.rounds))} ({_range(each.rounds)})" for each in beside),
            "" if figure.ratio is None else f"{figure.ratio:.2f}",
            "" if figure.goal is None else str(figure.goal),
            {None: "", True: "[green]yes", False: "[red]no"}[figure.is_met],
            "" if figure.is_steady else "[yellow]disagree",
        )
    return table


def _range(rounds: Sequence[float]) -> str:
    return f"{number(min(rounds))} .. {number(max(rounds))}"


def number(value: float) -> str:
    """Return a figure as people read it: three digits, or thousands set apart."""
    if value >= 999.5:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.3g}" if value else "0"
