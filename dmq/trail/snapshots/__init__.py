"""Snapshots of a store as Parquet files: layout, rows, writing and retention.

Imports: ``dmq.store`` and below. Interface: taking a snapshot of a running or a stopped store.
"""
