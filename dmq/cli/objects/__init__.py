"""Commands about named objects: topics, groups, clients, quotas, access keys, contexts.

Imports: bulk, session, output. Interface: ``app`` of each module.
"""
