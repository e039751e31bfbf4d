"""Options and fixtures that every test folder shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# One thread a test process: tests run side by side, and bitwise comparisons need one order of summation.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail instead of skipping where CUDA is missing")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    if config.getoption("--require-gpu"):
        raise pytest.UsageError("--require-gpu: no CUDA device here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of this checkout."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of real click logs, named by ERASE_REC_DATA."""
    folder = os.environ.get("ERASE_REC_DATA")
    if not folder:
        pytest.skip("ERASE_REC_DATA names no folder of real click logs")
    return Path(folder)
