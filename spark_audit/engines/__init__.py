"""Tables and columns for two engines. Each rule is written once and runs in DuckDB in this process or on Spark.

Only the operations that the rules need are included, with Spark's names and semantics: nulls sort first, joins never
match nulls, and the sum of no rows is null. ``columns`` and ``functions`` generate the SQL of either engine. ``table``
defines the operations of a table and an engine; ``duck`` and ``spark`` implement them, and import their engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_audit.engines import functions
from spark_audit.engines.columns import Column, RowWindow
from spark_audit.engines.local import plain
from spark_audit.engines.table import Relation, Row, TableEngine, gathered, keep

if TYPE_CHECKING:
    from spark_audit.engines import duck, spark  # noqa: TC004 - a namespace, loaded at its first import

__all__ = [
    "Column",
    "Relation",
    "Row",
    "RowWindow",
    "TableEngine",
    "duck",
    "functions",
    "gathered",
    "keep",
    "plain",
    "spark",
]
