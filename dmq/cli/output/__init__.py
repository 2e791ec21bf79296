"""Output of commands: tables, JSON, times, histograms, errors and exit codes.

Imports: ``dmq.config`` and below. Interface: tables, errors, exports.
"""
