"""Faults of the host: slow, full, frozen and failing disks, clocks that are set, networks that are cut.

Imports: no package.
"""
