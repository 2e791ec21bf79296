"""Message filters: by tag, or by an SQL92 expression over message properties.

Imports: ``broker_adapter``. Interface: filters and their compiler.
"""
