"""Deliveries to consumers: receive, acknowledge, extend, return, lease expiry.

Imports: failures, filters, groups, limits and below. Interface: deliveries, dispatch, lease expiry.
"""
