"""Sections of the page: each module computes the content that its template renders.

Imports: ``spark_audit.report``. Interface: the names that ``html`` and ``summary`` import.
"""
