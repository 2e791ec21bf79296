"""Clients of the classic protocol that divide queues among themselves, served in this process.

Imports: pulling, deliveries and below. Interface: clients, message conversion, send-back.
"""
