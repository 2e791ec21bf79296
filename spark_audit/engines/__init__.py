"""Tables and columns for two engines. Each rule is written once and runs in DuckDB in this process or on Spark.

Only the operations that the rules need are included, with Spark's names and semantics: nulls sort first, joins never
match nulls, and the sum of no rows is null. ``columns`` and ``functions`` generate the SQL of either engine. ``table``
defines the operations of a table and an engine; ``duck`` and ``spark`` implement them.
"""

from __future__ import annotations
