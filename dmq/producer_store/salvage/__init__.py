"""Salvage of a damaged directory of the hook's local store.

Imports: directories, entries and below. Interface: the salvage.
"""
