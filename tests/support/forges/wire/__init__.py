"""Requests and answers: of the admin service, frames of processes, malformed and hostile input.

Imports: ``clients.wire``.
"""
