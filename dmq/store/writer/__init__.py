"""The writer thread: turns operations into one atomic batch and one sync, then answers their callers.

Imports: engines, files, schema. Interface: operations, the writer, marks.
"""
