"""The traced program of every kind of tower, over-arch and backend against the trainer's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.block import Bags, EncodedBlock
from data.features.dense import Standard
from data.features.fitted import Features
from data.features.id_range import IdRange
from data.gather import Picked, gather
from erase_rec.api.assembly import ContentCatalog
from erase_rec.cli.export_inputs import ModelInputs
from erase_rec.cli.export_programs import (
    Score,
    load_aot,
    load_onnx,
    load_program,
    refuse_without_compiler,
    save_aot,
    save_onnx,
    save_program,
    trace,
)
from erase_rec.cli.export_rows import first_rows, generated
from erase_rec.config.load import load_config
from erase_rec.config.schema import Config
from erase_rec.errors import UserError
from models.ctr_model import CTRModel, build_model
from models.embeddings.build import build_embeddings
from models.registry import TOWERS
from models.towers.tower import Tower

CPU = torch.device("cpu")
SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"hidden": [8], "out_dim": 6, "batch_norm": True, "dropout": 0.5},
    "dot_interaction": {"bottom_hidden": [8], "hidden": [8], "out_dim": 6},
    "dcn_v2": {"num_layers": 2, "rank": 3, "out_dim": 6},
    "masknet": {"mask_hidden": 8, "hidden": [16, 12], "out_dim": 6},
    "autoint": {"num_layers": 1, "num_heads": 2, "head_dim": 3, "out_dim": 6},
    "fm": {"out_dim": 6},
    "deepfm": {"hidden": [8], "out_dim": 6},
    "cin": {"layer_sizes": [4], "out_dim": 6},
    "bilinear": {"hidden1": [8, 4], "hidden2": [8, 6], "num_heads": 2, "out_dim": 6},
    "transformer": {"dim": 4, "heads": 2, "feed_forward": 2},
}
SPARSE = [
    {"name": "a", "num_embeddings": 8},
    {"name": "tags", "num_embeddings": 7, "multi_valued": True, "pooling": "mean", "separator": "|"},
    {"name": "b", "num_embeddings": 9},
    {"name": "terms", "num_embeddings": 5, "multi_valued": True, "weights": "shares", "separator": "|"},
]


def towers(*kinds: str, **more: Any) -> list[dict[str, Any]]:
    return [{"name": f"the_{kind}", "kind": kind, "params": SMALL[kind], **more} for kind in kinds]


def configured(tmp_path: Path, tower_list: list[dict[str, Any]], **sections: Any) -> Config:
    import yaml

    content = {
        "data": {"kind": "csv", "train": "train.csv", "label": {"column": "y"}},
        "features": {
            "sparse_defaults": {"encoding": "id"},
            "dense": [{"name": f"d{number}"} for number in range(4)],
            "sparse": SPARSE,
        },
        "embedding": {"dim": 4, "backend": "torch"},
        "towers": tower_list,
        "train": {"steps": 1, "device": "cpu"},
        **sections,
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(content))
    return load_config(str(tmp_path / "c.yaml"), [], catalog=ContentCatalog()).config


class Case:
    """A model of random weights and rows for it."""

    def __init__(self, config: Config) -> None:
        encodings = tuple(IdRange(int(feature.num_embeddings or 0)) for feature in config.features.sparse)
        self.config = config
        self.features = Features(config.features, tuple(Standard() for _ in config.features.dense), encodings)
        self.model = build_model(config, build_embeddings(config, self.features.table_rows, CPU), CPU)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():  # initial weights of 0 and 1, or running statistics, would hide a mistake
            for value in self.model.dense_state().values():
                if value.is_floating_point():
                    value.copy_(torch.rand(value.shape, generator=generator) * 0.5 + 0.1)
            for table in self.model.embeddings.tables().values():
                assert isinstance(table, torch.Tensor)
                table.copy_(torch.randn(table.shape, generator=generator))
        self.model.train(False)

    def program(self) -> torch.export.ExportedProgram:
        return trace(self.model, self.config.features, ModelInputs.of(generated(self.features, 16, seed=1)))

    def assert_same(self, score: Score) -> None:
        """For batches of 1, 2 and many rows, some with empty bags only."""
        for count in (1, 2, 3, 200):
            block = generated(self.features, count, seed=count)
            for each in (block, without_values(block)):
                expected = expected_logit(self.model, each)
                probability, logit = score(ModelInputs.of(each))
                assert probability.shape == logit.shape == (count,)
                assert (probability.double() - expected.double().sigmoid()).abs().max() <= 1e-6
                torch.testing.assert_close(logit, expected, rtol=1e-5, atol=1e-5)
        assert expected_logit(self.model, generated(self.features, 200, seed=9)).std() > 1e-3, "says nothing"


def without_values(block: EncodedBlock) -> EncodedBlock:
    """The same rows with empty bags."""
    none = np.zeros(block.num_rows + 1, dtype=np.int64)
    bags = {
        position: Bags(bag.values[:0], none, None if bag.weights is None else bag.weights[:0])
        for position, bag in block.bags.items()
    }
    return EncodedBlock(block.dense, block.ids, bags, block.label, block.rows)


def expected_logit(model: CTRModel, block: EncodedBlock) -> torch.Tensor:
    rows = np.arange(block.num_rows)
    (batch,) = gather(Picked([block], rows, [block.num_rows]), rows)
    with torch.no_grad():
        return model.score(batch).logit


def test_every_kind_of_tower_in_one_model(tmp_path: Path) -> None:
    assert set(SMALL) == set(TOWERS)
    case = Case(configured(tmp_path, towers(*TOWERS)))
    program = case.program()
    save_program(program, tmp_path / "m.pt2")
    case.assert_same(load_program(tmp_path / "m.pt2"))
    kept = [name for name in program.state_dict if "head" in name]
    assert kept == ["model.over_arch.head.linear.weight", "model.over_arch.head.linear.bias"], "heads nobody reads"


def test_chains_whose_logits_are_added(tmp_path: Path) -> None:
    chain = [
        {"name": "first", "kind": "mlp", "params": {"hidden": [4], "out_dim": 4}},
        {
            "name": "second",
            "kind": "transformer",
            "params": SMALL["transformer"],
            "inputs": {"dense": False, "sparse": ["tags", "b"], "towers": ["first"]},
        },
        {"name": "third", "kind": "fm", "inputs": {"dense": ["d2"], "towers": ["second"], "sparse": ["a", "terms"]}},
    ]
    case = Case(configured(tmp_path, chain, over_arch={"hidden": [6], "logits": "additive"}))
    program = case.program()
    save_program(program, tmp_path / "m.pt2")
    case.assert_same(load_program(tmp_path / "m.pt2"))
    assert sum("head" in name for name in program.state_dict) == 8


def test_tables_of_fbgemm_and_of_several_dimensions(tmp_path: Path) -> None:
    sparse = [feature | {"embedding_dim": 4 * (1 + at % 2)} for at, feature in enumerate(SPARSE)]
    sections = {
        "features": {"sparse_defaults": {"encoding": "id"}, "dense": [], "sparse": sparse},
        "embedding": {"backend": "torchrec"},
        "over_arch": {"hidden": [6], "logits": "inputs"},
    }
    case = Case(configured(tmp_path, towers("mlp"), **sections))
    save_program(case.program(), tmp_path / "m.pt2")
    case.assert_same(load_program(tmp_path / "m.pt2"))


def test_only_bags_after_tensordict_was_loaded(tmp_path: Path) -> None:
    """TorchRec brings it along; from then on the type of lists in a program that is loaded is its own."""
    import tensordict  # noqa: F401

    sections = {"features": {"sparse_defaults": {"encoding": "id"}, "sparse": [SPARSE[1]]}}
    case = Case(configured(tmp_path, towers("mlp"), **sections))
    save_program(case.program(), tmp_path / "m.pt2")
    score = load_program(tmp_path / "m.pt2")
    block = generated(case.features, 5, seed=2)
    torch.testing.assert_close(score(ModelInputs.of(block))[1], expected_logit(case.model, block))


def test_an_id_outside_its_table_is_refused(tmp_path: Path) -> None:
    case = Case(configured(tmp_path, towers("fm")))
    save_program(case.program(), tmp_path / "m.pt2")
    score = load_program(tmp_path / "m.pt2")
    for wrong in (-1, 10):
        inputs = ModelInputs.of(generated(case.features, 3, seed=2))
        inputs.ids[1, 0] = wrong
        with pytest.raises((IndexError, RuntimeError), match="out of range"):
            score(inputs)


def test_onnx_of_bags_and_weights(tmp_path: Path) -> None:
    case = Case(configured(tmp_path, towers("dot_interaction", "transformer")))
    names = ["dense", "ids", "m", "n", "o", "p", "q"]
    save_onnx(case.program(), tmp_path / "m.onnx", list(case.model.tower_names()), names, ["probability", "logit"])
    case.assert_same(load_onnx(tmp_path / "m.onnx"))
    import onnx

    graph = onnx.load(tmp_path / "m.onnx").graph
    assert [each.name for each in graph.input] == names
    assert [each.name for each in graph.output] == ["probability", "logit"]


class Bessel(Tower):
    """A tower that ONNX has no operation for."""

    out_dim = 4

    def forward(self, dense_BN: torch.Tensor, emb_BE: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(dense_BN[:, :4])


def test_onnx_names_what_it_cannot_express(tmp_path: Path) -> None:
    case = Case(configured(tmp_path, [*towers("fm"), {"name": "odd", "kind": "mlp", "params": {"out_dim": 4}}]))
    case.model.tower("odd").tower = Bessel()
    with pytest.raises(UserError, match=r"--onnx: tower 'odd' uses prims.bessel_j0.default, which cannot be expressed"):
        save_onnx(case.program(), tmp_path / "m.onnx", list(case.model.tower_names()), ["dense"], ["probability"])


def test_a_compiled_program(tmp_path: Path) -> None:
    case = Case(configured(tmp_path, towers("fm"), over_arch={"hidden": []}))
    save_aot(case.program(), tmp_path / "m.aoti.pt2")
    case.assert_same(load_aot(tmp_path / "m.aoti.pt2"))


def test_no_compiler_is_said_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", (None, "no-such-compiler"))
    with pytest.raises(UserError, match="--aot: AOTInductor compiles the model, and there is no C"):
        refuse_without_compiler()


def test_inputs_of_a_part_of_a_block(tmp_path: Path) -> None:
    case = Case(configured(tmp_path, towers("fm")))
    block = generated(case.features, 20, seed=4)
    whole = ModelInputs.of(first_rows(block, 12)).flat()
    parts = [ModelInputs.of(block, start, stop).flat() for start, stop in ((0, 5), (5, 5), (5, 12))]
    for tensor, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(tensor, torch.cat(pieces))


def test_a_full_disk_ends_no_process(tmp_path: Path) -> None:
    """Given a path, torch's own writer calls ``std::terminate``."""
    path = tmp_path / "model.pt2"
    path.symlink_to("/dev/full")
    layer = torch.nn.Linear(200, 200)
    program = torch.export.export(layer, (torch.ones(3, 200),))
    with pytest.raises(OSError, match="No space left"):
        save_program(program, path)
