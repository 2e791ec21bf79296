"""Operations of the admin API: a class with a method per RPC for each subject, on the store and the broker.

``daemon``    status, settings, the clock, backups
``objects``   topics, groups, schedules, quotas, clients
``messages``  one message, lists, searches, changes, dead letters, due times, replays
``trail``     activity log, audits, events, the ledger

Imports: requests, the broker, recovery and below; from ``daemon`` down to ``messages``. Interface: the four packages.
"""
