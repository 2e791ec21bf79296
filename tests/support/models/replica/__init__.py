"""Simulation of primaries and standbys: threads, links and object store in simulated time.

Imports: no package.
"""
