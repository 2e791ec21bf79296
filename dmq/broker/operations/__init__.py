"""Operators' work on topics, groups and dead letters; retention and lag.

Imports: all other packages of the broker. Interface: administration, removal jobs, dead letters, retention, lag.
"""
