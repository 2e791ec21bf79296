"""How the tests run Java: programs that live for seconds or minutes, beside others, on few processors.

The second compiler would cost more than it brings. The first one alone gives its code 48 MiB, which some audits of one
Spark session fill: from then on nothing is compiled, and each audit takes longer than the one before.
"""

from __future__ import annotations

SHORT_LIVED = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:ReservedCodeCacheSize=256m")
SPARK = " ".join(SHORT_LIVED)  # as Spark's settings want them
# Compiling plans takes longer than running them on trails of the tests' size. On one machine an audit sees to that.
_UNCOMPILED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
UNCOMPILED_OPTIONS = [word for name, value in _UNCOMPILED.items() for word in ("--conf", f"{name}={value}")]
