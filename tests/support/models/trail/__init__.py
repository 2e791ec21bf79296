"""A second opinion on audit trails: a reader, an oracle, a judge of audits, and expected snapshots.

Imports: ``models.store``, ``forges.trail``, ``forges.cells``.
"""
