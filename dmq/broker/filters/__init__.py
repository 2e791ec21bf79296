"""Message filters: by tag, or by an SQL92 expression over message properties.

Imports: ``broker_adapter``. Interface: filters and their compiler.
"""

from __future__ import annotations

from dmq.broker.filters.filters import Filters, Passes, compile_sql

__all__ = ["Filters", "Passes", "compile_sql"]
