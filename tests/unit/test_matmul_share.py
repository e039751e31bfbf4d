"""Matrix products' share of the device: what cuBLAS is told, and that it is told the old number again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from erase_rec.matmul_share import matmul_share

CUDA = torch.device("cuda")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Multiprocessors that are left out, newest last, of a device of 132."""
    found: list[int | None] = [None]
    monkeypatch.setattr(torch._C, "_get_sm_carveout_experimental", lambda: found[-1])
    monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", found.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    return found


@pytest.mark.parametrize(("share", "left_out"), [(0.5, 66), (0.33, 88), (0.001, 131)])
def test_share_holds_inside_alone(told: list[int | None], share: float, left_out: int) -> None:
    def fail() -> None:
        assert told[-1] == left_out
        raise KeyError

    with pytest.raises(KeyError), matmul_share(share, CUDA):
        fail()
    assert told == [None, left_out, None]


@pytest.mark.parametrize(("share", "device"), [(1.0, CUDA), (0.5, torch.device("cpu"))])
def test_nothing_is_touched_where_it_has_no_meaning(told: list[int | None], share: float, device: torch.device) -> None:
    with matmul_share(share, device):
        assert told == [None]
