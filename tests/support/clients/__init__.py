"""Clients of a daemon: official and our own, applications, operators, readers of the documentation, and their load."""
