"""How memory and disk are shared out: pure functions of a sample."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.errors import DataError
from data.prepared.budget import (
    GROUP_CHUNKS,
    MAIN_BYTES,
    MARGIN,
    MERGE_BYTES,
    MIB,
    MOST_MERGE_BYTES,
    Sample,
    estimate_disk,
    share_memory,
)
from data.prepared.words import duration_in_words, size_in_words
from erase_rec.cli.prepare import read_size
from erase_rec.errors import UserError


def sample_of(peak_bytes: int = 200 * MIB, task_bytes: int = 500, rows: int = 1000) -> Sample:
    return Sample(
        rows,
        8 * MIB,
        part_bytes=150_000,
        spill_bytes=300_000,
        task_bytes=task_bytes,
        peak_bytes=peak_bytes,
        seconds=0.5,
    )


@given(st.integers(64, 1 << 14), st.integers(1, 64), st.integers(50, 2000), st.sampled_from([500, 8 * MIB]))
def test_all_processes_together_stay_below_the_bound(bound: int, wanted: int, peak: int, task_bytes: int) -> None:
    main, sample = 120 * MIB, sample_of(peak * MIB, task_bytes)
    try:
        memory = share_memory(bound * MIB, wanted, main_bytes=main, sample=sample)
    except DataError:
        return
    assert 1 <= memory.workers <= wanted
    assert MERGE_BYTES <= memory.merge_bytes <= MOST_MERGE_BYTES
    in_flight = GROUP_CHUNKS * task_bytes * (1 + 4 * memory.workers)
    assert main + MAIN_BYTES + memory.workers * peak * MIB * MARGIN + in_flight + memory.merge_bytes <= bound * MIB + 64


@given(st.integers(1, 2000), st.integers(0, 3000))
def test_the_bound_that_a_refusal_names_works(peak: int, features: int) -> None:
    sizes = {"main_bytes": 120 * MIB, "features_bytes": features * MIB}
    sample = sample_of(peak * MIB)
    with pytest.raises(DataError, match=r"--memory: 64 MiB are too little") as refused:
        share_memory(64 * MIB, 3, sample=sample, **sizes)
    named = int(str(refused.value).split("--memory ")[-1].split("MiB")[0])
    assert share_memory(named * MIB, 3, sample=sample, **sizes).workers >= 1
    with pytest.raises(DataError):
        share_memory((named - 16) * MIB, 3, sample=sample, **sizes)


def test_a_sample_is_scaled_by_the_bytes_of_the_input() -> None:
    disk = estimate_disk(sample_of(), 80 * MIB, workers=2)
    assert (disk.rows, disk.part_bytes, disk.spill_bytes, disk.seconds) == (10_000, 1_500_000, 3_000_000, 2.5)
    assert estimate_disk(sample_of(rows=0), 8 * MIB, workers=1).rows == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GiB", 2 << 30),
        ("512MiB", 512 << 20),
        ("1.5g", 3 << 29),
        ("2 GB", 2_000_000_000),
        ("300kB", 300_000),
        ("1T", 1 << 40),
        ("1048576", 1 << 20),
    ],
)
def test_sizes_as_people_write_them(text: str, expected: int) -> None:
    assert read_size(text) == expected


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "0", "2PiB", "GiB", "1e9"])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(UserError, match="expected a size such as"):
        read_size(text)


def test_sizes_and_times_in_words() -> None:
    assert [size_in_words(size) for size in (7, 1500, 999_000, 72_400_000, 4_200_000_000_000)] == [
        *("7 bytes", "1.5 kB", "999 kB", "72.4 MB", "4.2 TB")
    ]
    assert [duration_in_words(seconds) for seconds in (0.1, 89, 600, 7200)] == ["1 s", "89 s", "10 min", "2.0 h"]


def test_preparing_loads_no_torch(checkout: Path) -> None:
    """A worker of 300 MiB instead of 90 would halve the workers that fit."""
    modules = (
        "data.prepared.prepare, data.prepared.work, data.inspection, erase_rec.cli.prepare, erase_rec.cli.inspect, "
        "data.sources.criteo, data.sources.avazu, data.sources.csv, data.sources.parquet, data.sources.synthetic"
    )
    script = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=checkout, check=True, timeout=120)
