"""What a figure is: measured values, a goal, something beside it; and how figures are shown and kept."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal

from rich.table import Table

SCHEMA = 1
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
        return f"{self.sign} {self.bound:.0%}" if self.of == "ratio" else f"{self.sign} {_number(self.bound)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """The floor or the peer, measured in the same rounds."""

    what: str
    rounds: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table; ``rounds`` holds one value per round.

    Of a difference, whose rounds scatter around zero, only what stands beside it can be steady.
    """

    name: str
    what: str
    unit: str
    rounds: Sequence[float]
    goal: Goal | None = None
    beside: Beside | None = None
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
            "beside": None
            if self.beside is None
            else {
                "what": self.beside.what,
                "value": median(self.beside.rounds),
                "min": min(self.beside.rounds),
                "max": max(self.beside.rounds),
            },
            "ratio": self.ratio,
            "is_steady": self.is_steady,
            "goal": None if self.goal is None else str(self.goal),
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
        beside = figure.beside
        table.add_row(
            figure.name,
            _number(figure.value),
            _range(figure.rounds),
            figure.unit,
            "" if beside is None else f"{beside.what}: {_number(median(beside.rounds))} ({_range(beside.rounds)})",
            "" if figure.ratio is None else f"{figure.ratio:.2f}",
            "" if figure.goal is None else str(figure.goal),
            {None: "", True: "[green]yes", False: "[red]no"}[figure.is_met],
            "" if figure.is_steady else "[yellow]disagree",
        )
    return table


def write_json(path: Path, figures: Sequence[Figure], options: Mapping[str, object]) -> None:
    """Keep the figures, with what is needed to compare them with another run's."""
    kept = {
        "schema": SCHEMA,
        "machine": {
            "cpus": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "load_average": os.getloadavg(),
        },
        "commit": _commit(),
        "options": dict(options),
        "figures": [figure.plain() for figure in figures],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip()


def _range(rounds: Sequence[float]) -> str:
    return f"{_number(min(rounds))} .. {_number(max(rounds))}"


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.3g}" if value else "0"
