"""The engines that audits run on: DuckDB by default, in a long run Spark too.

``test_engines`` holds them to the same bytes in every run; all other tests ask one of them what it finds. There is one
Spark session for all tests of this folder: starting one takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from pyspark.sql import SparkSession
from support.clients.java.jvm import SPARK
from support.effort import EFFORT

from spark_audit.engines.table import TableEngine


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A local session with two cores and two partitions, set as the audit sets its own."""
    from spark_audit.session import open_session

    builder = SparkSession.Builder().master("local[2]").appName("tests")
    for key, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.extraJavaOptions": SPARK,
        "spark.sql.files.openCostInBytes": "65536",
        "spark.python.sql.dataFrameDebugging.enabled": "false",
    }.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield open_session()
    session.stop()


@pytest.fixture(scope="session", params=["duckdb", "spark"] if EFFORT > 1 else ["duckdb"])
def engine(request: pytest.FixtureRequest) -> Iterator[TableEngine]:
    """What a test's audits run on."""
    if request.param == "spark":
        from spark_audit.engines.spark import SparkEngine

        yield SparkEngine(request.getfixturevalue("spark"))
        return
    from spark_audit.engines.duck import DuckEngine

    with closing(DuckEngine(threads=2)) as made:
        yield made
