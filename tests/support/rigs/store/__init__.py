"""Stores: rows and their counts, an engine that stops or fails, and a process with a store.

Imports: no package.
"""
