"""Audit trails made by hand, and damage, cuts and lies in them. Nothing here uses code of the product.

Imports: no package.
"""
