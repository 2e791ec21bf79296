"""Deliveries to consumers: receive, acknowledge, extend, give back, lease expiry.

Imports: failures, filters, groups, limits and below. Interface: deliveries, dispatch, lease expiry.
"""
