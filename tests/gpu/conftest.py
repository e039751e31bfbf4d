"""Each test on a device leaves the process as it found it, whatever it ended with; long tests start first."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from erase_rec.api.assembly import restored_settings
from erase_rec.autograd_thread import wake_autograd

LONG = ("test_table1_cuda.py", "test_compile_cuda.py")
"""Files with tests that take as long as many others together."""
Waits = Callable[[], AbstractContextManager[None]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each of the long tests at the head of a worker's share: xdist's ``worksteal`` begins with equal shares."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if item.path.name in LONG]
    others = [item for item in items if item.path.name not in LONG]
    share = len(items) / workers
    items[:] = others
    for number, item in enumerate(long):
        items.insert(int(number % workers * share), item)


def set_waits(mode: str) -> None:
    """What happens where the host waits for the device: ``default`` (nothing) or ``error``."""
    with warnings.catch_warnings():
        # Any change of it is remarked on, once, after it has taken effect: it may miss some waits.
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)


@pytest.fixture
def host_never_waits() -> Waits:
    """A block in which it is an error if the host waits for the device."""

    @contextmanager
    def block() -> Iterator[None]:
        set_waits("error")
        try:
            yield
        finally:
            set_waits("default")

    return block


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device, set up: kernels that are called without a machine find autograd's thread awake, too."""
    torch.cuda.init()
    found = torch.device("cuda", torch.cuda.current_device())
    wake_autograd(found)
    return found


@pytest.fixture(autouse=True)
def process_as_found(device: torch.device) -> Iterator[None]:
    """Puts back what a test that failed may leave, so that it makes no other test fail.

    A capture that fails at its end leaves its stream current, and the device's generator counting for the capture; only
    another state of the generator ends that. Errors that the device reports late belong to the test that made them.
    """
    generator = torch.cuda.default_generators[device.index]
    with restored_settings(on_cuda=True):
        before = generator.clone_state()
        yield
        set_waits("default")
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.default_stream(device))
        generator.graphsafe_set_state(before)
    torch.cuda.synchronize(device)
