"""Costs of calls and input: processor time, memory, and collections that must not be iterated.

Imports: no package.
"""
