"""Which backend a configuration gets, and what it is told."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from erase_rec.batch import SparseBatch
from erase_rec.config.schema import Config, SparseOptimizerConfig
from erase_rec.errors import ConfigError, UserError
from models.embeddings import build, own_kernels
from models.embeddings.build import build_embeddings, choose_backend
from models.embeddings.torch_backend import TorchEmbeddings
from models.embeddings.torchrec_backend import TorchRecEmbeddings

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def config(backend: str = "auto", kind: str = "rowwise_adagrad", dim: int = 8, names: str = "ab") -> Config:
    sections: dict[str, Any] = {
        "data": {"kind": "criteo"},
        "features": {"sparse": [{"name": name, "num_embeddings": 10} for name in names]},
        "embedding": {"backend": backend, "dim": dim},
        "towers": [{"name": "deep", "kind": "mlp"}],
        "optimizer": {"sparse": {"kind": kind}},
        "train": {"steps": 1},
    }
    return Config.model_validate(sections)


@pytest.mark.parametrize(("backend", "expected"), [("auto", "torch"), ("torchrec", "torchrec"), ("torch", "torch")])
def test_the_backend_that_is_asked_for_is_built(backend: str, expected: str) -> None:
    assert choose_backend(config(backend), CPU)[0] == expected
    embeddings = build_embeddings(config(backend), {"a": 12, "b": 5}, CPU)
    assert isinstance(embeddings, TorchRecEmbeddings if expected == "torchrec" else TorchEmbeddings)
    assert {name: tuple(table.shape) for name, table in embeddings.tables().items()} == {"a": (12, 8), "b": (5, 8)}


@pytest.mark.parametrize("backend", ["torchrec", "torch"])
def test_embeddings_come_out_in_the_dtype_that_is_asked_for(backend: str) -> None:
    ids = SparseBatch(torch.arange(4), torch.ones(4, dtype=torch.int32), None, 2, single_valued=True)
    embeddings = build_embeddings(config(backend), {"a": 12, "b": 5}, CPU, torch.bfloat16)
    assert embeddings(ids).dtype == torch.bfloat16
    assert all(weight.dtype == torch.float32 for weight in embeddings.tables().values())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "adam"}, "FBGEMM has no Adam on the CPU"),
        ({"dim": 10}, "multiples of 4, found 10 of feature 'a', 10 of feature 'b'"),
    ],
)
def test_what_fbgemm_cannot_do_on_a_cpu_is_refused(changes: dict[str, Any], reason: str) -> None:
    assert choose_backend(config(**changes), CPU)[0] == "torch"
    with pytest.raises(UserError, match=r"embedding\.backend: torchrec: .*embedding\.backend=torch") as error:
        build_embeddings(config("torchrec", **changes), {"a": 12, "b": 5}, CPU)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("device", "kind", "triton", "expected"),
    [
        ("cuda", "rowwise_adagrad", True, True),
        ("cuda", "sgd", True, True),
        ("cuda", "adam", True, False),
        ("cpu", "sgd", True, False),
        ("cuda", "sgd", False, False),
    ],
)
def test_own_kernels_need_cuda_triton_and_an_optimizer_that_they_know(
    monkeypatch: pytest.MonkeyPatch, device: str, kind: Any, triton: bool, expected: bool
) -> None:
    monkeypatch.setattr(own_kernels, "TRITON_INSTALLED", triton)
    assert own_kernels.own_kernels_apply(torch.device(device), SparseOptimizerConfig(kind=kind)) is expected


def test_on_cuda_tables_are_torchrecs_where_it_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_backend(config(), CUDA)[0] == "torchrec"
    assert choose_backend(config(dim=10), CUDA)[0] == "torch"
    monkeypatch.setattr(build, "triple_problem", lambda: "found torch 2.12.0")
    assert choose_backend(config(), CUDA) == ("torch", "found torch 2.12.0")
    with pytest.raises(UserError, match=r"found torch 2\.12\.0"):
        choose_backend(config("torchrec"), CPU)


def test_without_torchrec_and_fbgemm_tables_train(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in {"torchrec", "fbgemm_gpu"}]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "torchrec", None)
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    assert choose_backend(config(), CUDA)[0] == "torch"
    assert "does not import" in choose_backend(config(), CUDA)[1]
    embeddings = build_embeddings(config(), {"a": 12, "b": 5}, CPU)
    ids = SparseBatch(torch.arange(4), torch.ones(4, dtype=torch.int32), None, 2, single_valued=True)
    pooled = embeddings(ids)
    before = pooled.detach().clone()
    embeddings.backward_and_update(pooled, torch.ones(2, 16), embeddings.order(ids))
    with torch.no_grad():
        assert bool((embeddings(ids) < before).all())


def test_a_model_without_sparse_features_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"features\.sparse: .*at least 1"):
        build_embeddings(config(names=""), {}, CPU)
