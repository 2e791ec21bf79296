"""Clients of the product: official and own clients, applications, operators, readers of the documentation, and load."""
