"""The page of figures, ``performance.md`` and its pictures: generated from ``bench/results.json``, without measuring.

``python -m bench report [--json FILE] [--page FOLDER]``. The part between the two marks of the page is written by hand
and kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench import page as pages
from bench.kept import NothingKept, read
from bench.pictures import pictures_of
from bench.place import ROOT

RESULTS = Path(__file__).parent / "results.json"
PAGE = "performance.md"
PICTURES = "pictures"
DOCS = ROOT / "docs" / "reference"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    *,
    json: Annotated[Path, typer.Option(help="Where the figures are kept.", metavar="FILE")] = RESULTS,
    page: Annotated[Path | None, typer.Option(help="Folder of the page (docs/reference).", metavar="FOLDER")] = None,
) -> None:
    """Write the page and its pictures from the figures that are kept. Measures nothing."""
    folder = page or folder_of(json)
    try:
        write(json, folder)
    except NothingKept as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"written: {folder / PAGE}")


def folder_of(json: Path) -> Path:
    """Return where the page of these figures goes: what is kept elsewhere is shown elsewhere, not in the documents."""
    return DOCS if json.resolve() == RESULTS.resolve() else json.parent


def write(json: Path, folder: Path) -> None:
    """Write page and pictures. Raises NothingKept, and has changed nothing then.

    A picture whose figures were kept without their histograms stays as it is.
    """
    kept = read(json)
    drawn = pictures_of(kept["figures"])
    target = folder / PAGE
    by_hand = pages.by_hand_of(target.read_text(encoding="utf-8")) if target.exists() else pages.NOTHING_BY_HAND
    names = {*drawn, *(path.stem for path in (folder / PICTURES).glob("*.svg"))}
    text = pages.page_of(kept, {name: f"{PICTURES}/{name}.svg" for name in names}, by_hand)
    (folder / PICTURES).mkdir(parents=True, exist_ok=True)
    for name, svg in drawn.items():
        _replace(folder / PICTURES / f"{name}.svg", svg)
    _replace(target, text)


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".new")  # a page that is cut short would lose what was written by hand
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
