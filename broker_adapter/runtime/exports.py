"""Exports of a package that are imported at their first use, so that importing the package costs nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_exports(package: str, names_of: Mapping[str, str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package: for each module the exported names, separated by spaces."""
    modules = {name: module for module, names in names_of.items() for name in names.split()}

    def export(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return export
