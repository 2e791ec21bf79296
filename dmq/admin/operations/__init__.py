"""Operations of the admin API, one module per subject.

Imports: requests, the broker, recovery and below. Interface: one class per subject, used by the service.
"""
