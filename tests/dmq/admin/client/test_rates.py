"""Rates from totals that a daemon counts."""

from __future__ import annotations

from dmq.admin.client.rates import Sample, rates_of


def test_rates_need_two_samples_of_one_run() -> None:
    """After a restart, or with a clock that was set back, there are none."""
    first, second = Sample(1_000, 10, 5, 5), Sample(3_000, 30, 5, 6)
    assert rates_of([first]) is None
    assert rates_of([first, second]) == {"accepted": 10.0, "delivered": 0.0, "acked": 0.5}
    assert rates_of([second, first]) is None
    assert rates_of([first, Sample(5_000, 0, 0, 0)]) is None
