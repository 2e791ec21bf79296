"""The writer thread: operations become one atomic batch, one sync and the answers.

Imports: engines, files, schema. Interface: operations, the writer, marks.
"""
