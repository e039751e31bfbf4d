"""An interrupt that a finalizer swallows is raised at the next check."""

from __future__ import annotations

import signal

import pytest

from erase_rec.interrupt import noted_interrupts


def test_a_swallowed_interrupt_is_raised_by_the_check() -> None:
    with noted_interrupts() as check:
        check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()


def test_the_handler_of_before_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with noted_interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
