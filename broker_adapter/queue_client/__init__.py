"""Producers and consumers of a cluster by its address: routes, heartbeats, balance, offsets.

Imports: contracts, runtime, popping, remoting. Interface: ``connect`` and its blocking variant.
"""
