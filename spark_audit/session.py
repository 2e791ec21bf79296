"""Spark session of an audit: its settings, with their reasons."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",  # an overflow is an error, not a wrong number
    "spark.sql.adaptive.enabled": "true",
    # a cell may be called 007 and an hour is 09: values in paths are text
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    "spark.sql.parquet.filterPushdown": "true",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
}
_OF_A_NEW_ONE = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.parquet.compression.codec": "zstd",
    # otherwise each column records its Python line for errors: half of all calls into the JVM
    "spark.python.sql.dataFrameDebugging.enabled": "false",
}
# Driver and executors are one process, so no other machine must reach it.
_OF_A_LOCAL_ONE = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": "-XX:+UseParallelGC",  # 15 % faster than the default collector on a big trail
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",  # a job lists slower than this machine
}
PARTITIONS = 8
_PARTS = "spark.sql.files.minPartitionNum"
# A trail up to this size is read into one partition: no exchange, one task per action, and a short plan.
SMALL_BYTES = 500_000
_IS_SMALL = "spark.rockdmq.audit.isSmall"
_OF_A_SMALL_ONE = {
    _IS_SMALL: "true",
    "spark.sql.adaptive.enabled": "false",  # adaptive execution plans again after each exchange
    "spark.sql.autoBroadcastJoinThreshold": "-1",  # a broadcast is a job of its own
    "spark.sql.optimizer.disableHints": "true",  # also if a rule requests it
    "spark.sql.maxSinglePartitionBytes": "8000p",  # Spark treats each join as a product
    # compiling a plan is slower than running it
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.ui.explainMode": "simple",  # avoids the unused text of every plan
}
# Errors of a failed job: some errors of the JVM are not wrapped.
READ_ERRORS = (PySparkException, Py4JJavaError)


def open_session(name: str = "rock-dmq audit", *, partitions: int = PARTITIONS) -> SparkSession:
    """Return the active session, or create one. Under spark-submit it uses that master, otherwise all local cores.

    Settings that affect the results (time zone, ANSI, types of path columns) are applied in both cases.
    """
    spark = SparkSession.getActiveSession()
    if spark is None:
        conf = _submitted()
        settings = {"spark.master": "local[*]", "spark.sql.shuffle.partitions": str(partitions)} | _OF_A_NEW_ONE
        if conf.get("spark.master", "local").startswith("local"):
            settings |= _OF_A_LOCAL_ONE
        builder = SparkSession.Builder().appName(name)
        for key, value in settings.items():
            if key not in conf:
                builder = builder.config(key, value)
        spark = builder.getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
    _know_classes(spark)
    for key, value in _SETTINGS.items():
        spark.conf.set(key, value)
    context = spark.sparkContext
    if (context.master or "").startswith("local") and spark.conf.get(_PARTS, None) is None:
        # Spark makes one part per core and one more for the remainder, and all wait for that one
        spark.conf.set(_PARTS, str(max(PARTITIONS, context.defaultParallelism)))
    return spark


def _submitted() -> dict[str, str]:
    """Return the settings of spark-submit; empty if Python was started directly."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    SparkContext._ensure_initialized()
    return dict(SparkConf(loadDefaults=True).getAll())


class _Class:
    """JVM class with cached members. Without the cache py4j looks them up in the JVM at each use of a function."""

    def __init__(self, there: Any) -> None:  # noqa: ANN401 - py4j has no types
        self._there = there

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a method of Java
        found = getattr(self._there, name)
        if name in {"col", "lit"}:  # their results never change and are needed repeatedly
            found = lru_cache(maxsize=1_000, typed=True)(partial(found))
        setattr(self, name, found)
        return found


def _know_classes(spark: SparkSession) -> None:
    """Cache the classes that create columns; their look-up was a fifth of the audit time on a small trail."""
    jvm = spark.sparkContext._jvm
    for name in ("functions", "PythonUtils", "org.apache.spark.sql.functions"):
        if name not in vars(jvm):
            setattr(jvm, name, _Class(getattr(jvm, name)))


@contextmanager
def set_for(spark: SparkSession, trail_bytes: int) -> Iterator[None]:
    """Tune a local session for a trail of this size, and restore the settings after the block."""
    is_little = trail_bytes <= SMALL_BYTES and (spark.sparkContext.master or "").startswith("local")
    chosen = _OF_A_SMALL_ONE if is_little else {}
    before = {name: spark.conf.get(name, None) for name in chosen}
    try:
        for name, value in chosen.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, known in before.items():
            spark.conf.unset(name) if known is None else spark.conf.set(name, known)


def is_small(spark: SparkSession) -> bool:
    """Return True if the session is tuned for a small trail."""
    return spark.conf.get(_IS_SMALL, "false") == "true"
