"""Every fuzz target, briefly: its own examples, what once broke it (``corpus/TARGET/``), and new inputs.

The inputs are the same in every run. The long form, with bounds on memory and time, is benchmarks/fuzz.py.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from fuzz_target import Opened, attempt
from fuzz_targets import TARGETS
from hypothesis import HealthCheck, Phase, given, settings

CORPUS = Path(__file__).parent / "corpus"
INPUTS = 40
MOST_MIB = 2500
"""Growth of the process that is still no blow-up: a Parquet page may claim, and then be given, 2 GiB."""


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Opened]]:
    with chdir(tmp_path):
        yield request.param, TARGETS[request.param].open(tmp_path)


def test_readers_accept_or_refuse_and_never_break(target: tuple[str, Opened]) -> None:
    name, opened = target
    before = peak_mib()
    remembered = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    outcomes = [attempt(opened, content) for content in (*opened.examples, *remembered)]

    @settings(
        max_examples=INPUTS,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(opened.inputs)
    def some(content: bytes) -> None:
        outcomes.append(attempt(opened, content))

    some()
    assert len(outcomes) >= INPUTS
    assert not all(outcomes), "no input was refused: are they damaged at all?"
    assert peak_mib() - before < MOST_MIB


def test_a_valid_input_is_accepted(target: tuple[str, Opened]) -> None:
    """Else all that is tried would be refused for a reason of its own."""
    _, opened = target
    assert attempt(opened, opened.examples[0])


def test_the_corpus_is_of_targets_that_there_are() -> None:
    assert {path.name for path in CORPUS.iterdir() if path.is_dir()} <= TARGETS.keys()


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
