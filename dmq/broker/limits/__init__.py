"""Rates and quotas of topics and groups.

Imports: ``dmq.broker.topics`` and below. Interface: token buckets, ramps, topic quotas, group rates.
"""
