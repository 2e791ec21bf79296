"""Tables and columns for two engines: rules are written once in them, and run in DuckDB in this process or on Spark.

Only what the rules need is there, by Spark's names and meanings: nulls come first, a join never matches them, the sum
of nothing is null. ``columns`` and ``functions`` write expressions in the words of either engine, ``table`` says what a
table and an engine can do, ``duckdb`` and ``spark`` do it.
"""

from __future__ import annotations
