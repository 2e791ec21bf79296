"""The pages of the documentation, as the blocks of code that stand on them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[4]
_SHELL = re.compile(r"\$ |(?:\.venv/bin/)?(?:dmq|pip|python|make|unshare|DMQ_)\b|python3")
_CONTINUED = re.compile(r"\\\n\s*")


class Block(NamedTuple):
    """A block of code: fenced, or indented by four spaces."""

    page: str
    line: int
    language: str
    text: str

    @property
    def first(self) -> str:
        """Its first line that is not empty."""
        return next(line.strip() for line in self.text.splitlines() if line.strip())

    @property
    def has_output(self) -> bool:
        """Whether commands stand behind a prompt in it, with what they print below them."""
        return self.text.startswith("$ ")


class Command(NamedTuple):
    """A command of a block and what the page says that it prints."""

    text: str
    prints: str


def pages() -> list[str]:
    """Return all pages by their paths, those of folders of code too."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for folder in ("dmq", "retry", "broker_adapter", "spark_audit", "examples", "bench", "deploy"):
        found += (ROOT / folder).rglob("*.md")
    return sorted(str(page.relative_to(ROOT)) for page in found)


@cache
def blocks(page: str) -> list[Block]:
    """Return the blocks of a page, in their order; what nobody named the language of is told by its first line."""
    found = []
    parser = MarkdownIt("commonmark")
    parser.core.ruler.disable("inline")
    for each in parser.parse((ROOT / page).read_text(encoding="utf-8")):
        if each.type in {"fence", "code_block"}:
            assert each.map is not None
            language = each.info.strip() if each.type == "fence" else _guessed(each.content)
            found.append(Block(page, each.map[0] + 1, language, each.content))
    return found


def commands(block: Block) -> list[Command]:
    """Return the commands of a shell block: those behind a prompt with their output, or else each line."""
    lines = _CONTINUED.sub("", block.text).splitlines()
    if not block.has_output:
        return [Command(line, "") for line in lines if line.strip()]
    found: list[Command] = []
    for line in lines:
        if line.startswith("$ "):
            found.append(Command(line.removeprefix("$ "), ""))
        else:
            found[-1] = found[-1]._replace(prints=f"{found[-1].prints}{line}\n")
    return found


def arguments(line: str) -> Iterator[list[str]]:
    """Yield the words behind each ``dmq`` that a line of the shell runs."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set(";&|"):
            if words and words[0].rpartition("/")[2] == "dmq":
                yield words[1:]
            words = []
        else:
            words.append(word)


def _guessed(text: str) -> str:
    first = text.lstrip("\n")
    if _SHELL.match(first):
        return "sh"
    return "python" if first.startswith(("from ", "import ")) else ""
