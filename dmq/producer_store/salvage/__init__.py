"""Salvage of a damaged directory of the producer store.

Imports: directories, entries and below. Interface: the salvage.
"""
