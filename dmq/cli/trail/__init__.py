"""Commands about the audit trail, the ledger and the activity log.

Imports: bulk, session, output. Interface: ``app`` of each module.
"""
