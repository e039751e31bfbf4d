"""Starting from another run: names, what is taken and what not, rows of tables by category, parts of tables."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from data.dataset import load_features
from data.features.vocabulary import Vocabulary
from erase_rec import Config, Trainer
from erase_rec.checkpoint import CheckpointManager, load, stored_layout
from erase_rec.distributed.shards import Shard, Shards
from erase_rec.distributed.world import World
from erase_rec.errors import UserError
from erase_rec.run_folder import RunFolder
from erase_rec.warm_start.filling import fill
from erase_rec.warm_start.names import Renaming, unit_of
from erase_rec.warm_start.plan import Rows, Taken, WarmPlan, warm_plan

KNOWN = ["tables/user", "tables/a/b", "model/towers.deep.w", "model/towers.deep.b", "model/over_arch.w", "dense/age"]


def test_an_optimizers_state_follows_what_it_is_of() -> None:
    renaming = Renaming({"tables/a/b": "tables/c", "model/*.deep.*": "model/*.wide.*", "dense/*": "dense/my_*"}, KNOWN)
    assert renaming("tables/user") == "tables/user"
    assert renaming("table_optimizer/a/b/sum") == "table_optimizer/c/sum"
    assert renaming("optimizer/towers.deep.w/exp_avg") == "optimizer/towers.wide.w/exp_avg"
    assert renaming.plain("dense/age") == "dense/my_age"
    assert unit_of("table_optimizer/a/b/sum") == unit_of("tables/a/b") == "tables/a/b"
    assert unit_of("optimizer/towers.deep.w/step") == unit_of("model/towers.deep.b") == "towers.deep"
    assert unit_of("optimizer/over_arch.w/step") == unit_of("model/over_arch.w") == "over_arch"
    assert unit_of("rng/cpu") is None


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"tables/usr": "tables/u"}, r"'tables/usr' fits nothing in the checkpoint; did you mean 'tables/user'\?"),
        ({"model/towers.*": "model/towers.wide"}, r"has 1 '\*' and 'model/towers.wide' has 0; give both as many"),
        ({"tables/user": "tables/a/b"}, r"'tables/a/b' and 'tables/user' both become 'tables/a/b'; rename one"),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_refused(rename: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Renaming(rename, KNOWN)


F32 = torch.float32
STORED: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "model/towers.deep.w": ((3, 2), F32),
    "model/over_arch.w": ((3,), F32),
    "tables/user": ((5, 2), F32),
    "tables/gone": ((5, 2), F32),
    "table_optimizer/user/sum": ((5,), F32),
    "optimizer/towers.deep.w/step": ((), F32),
    "rng/cpu": ((9,), torch.uint8),
}


def planned(wanted: dict[str, tuple[tuple[int, ...], torch.dtype]], **options: Any) -> WarmPlan:
    renaming = Renaming({}, [name for name in STORED if name.startswith(("model/", "tables/"))])
    defaults: dict[str, Any] = {"rows": {"tables/user": Rows()}, "changed": {}, "with_states": True}
    return warm_plan(STORED, wanted, renaming, **(defaults | {"may_initialise": True} | options))


WANTED = {
    "model/towers.deep.w": ((3, 2), F32),
    "model/towers.new.w": ((3, 2), F32),
    "model/over_arch.w": ((4,), F32),
    "tables/user": ((8, 2), F32),
    "table_optimizer/user/sum": ((8,), F32),
    "optimizer/towers.deep.w/step": ((), F32),
    "optimizer/over_arch.w/step": ((), F32),
}


@pytest.mark.parametrize("with_states", [False, True])
def test_the_fate_of_every_tensor_is_known_and_said(with_states: bool) -> None:
    plan = planned(WANTED, with_states=with_states)
    assert sorted([*plan.taken, *plan.initialised]) == sorted(WANTED)
    assert sorted([*(entry.stored for entry in plan.taken.values()), *plan.ignored]) == sorted(STORED)
    assert ("table_optimizer/user/sum" in plan.taken) == with_states
    assert plan.initialised["optimizer/over_arch.w/step"].startswith("model/over_arch.w is [4], in the checkpoint [3]")
    assert plan.ignored["model/over_arch.w"] == "does not fit over_arch"
    text = plan.text(Path("there"))
    assert "tables/user: taken (5 rows by number; 3 new initialised)" in text
    assert "towers.new: initialised: the checkpoint has none" in text
    assert "tables/gone: ignored: this model has no such part" in text
    assert "rng: ignored: of the other run" in text


def test_all_that_does_not_fit_is_one_error_unless_it_may_be_initialised() -> None:
    with pytest.raises(UserError) as caught:
        planned(WANTED, may_initialise=False, changed={"towers.deep": "it reads other features"})
    for part in ("towers.deep: it reads other", "towers.new: the checkpoint has none", "over_arch: model/over_arch.w"):
        assert part in str(caught.value)
    assert "tables/user" not in str(caught.value)
    assert "train.init_from.missing=init" in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"tables/user": ((5, 4), F32)}, r"tables/user is \[5, 4\], in the checkpoint \[5, 2\]"),
        ({"model/towers.deep.b": ((2,), F32)}, "the checkpoint lacks model/towers.deep.b"),
        ({"model/over_arch.w": ((3,), F32), "optimizer/over_arch.w/m": ((3,), F32)}, "lacks the optimizer state"),
    ],
)
def test_why_a_part_does_not_fit_is_said(wanted: dict[str, tuple[tuple[int, ...], torch.dtype]], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        planned(wanted, may_initialise=False)


TABLE = torch.arange(20.0).reshape(5, 4)
SUMS = torch.arange(5.0)
SOURCE = torch.tensor([0, 1, 4, -1, 2, -1])
BY_KEY = torch.stack([TABLE[row] if row >= 0 else torch.full((4,), -7.0) for row in SOURCE.tolist()])


@pytest.mark.parametrize("source", [None, SOURCE], ids=["by number", "by key"])
def test_parts_of_tables_take_their_rows_and_keep_the_others(tmp_path: Path, source: Tensor | None) -> None:
    path = CheckpointManager(tmp_path, keep=1).save(
        1, {"tables/t": TABLE, "table_optimizer/t/sum": SUMS}, {}, is_best=False
    )
    expected = BY_KEY if source is not None else torch.cat((TABLE, torch.full((1, 4), -7.0)))
    taken = {
        name: Taken(stored, Rows(source))
        for name, stored in (("tables/new", "tables/t"), ("table_optimizer/new/sum", "table_optimizer/t/sum"))
    }
    cuts = [((0, 6), (0, 4))], [((0, 4), (0, 4))], [((4, 6), (0, 4))], [((0, 6), (0, 1)), ((0, 6), (2, 4))]
    for cut in cuts:
        parts = [
            Shard((rows[0], columns[0]), torch.full((rows[1] - rows[0], columns[1] - columns[0]), -7.0))
            for rows, columns in cut
        ]
        sums = Shard((cut[0][0][0],), torch.full((cut[0][0][1] - cut[0][0][0],), -7.0))
        into = {
            "tables/new": Shards((6, 4), F32, parts),
            "table_optimizer/new/sum": Shards((6,), F32, [sums]),
            "model/untouched": torch.ones(2),
        }
        fill(path, into, taken, World())
        for part, (rows, columns) in zip(parts, cut, strict=True):
            assert torch.equal(part.tensor, expected[slice(*rows), slice(*columns)])
        held = expected[:, 0] / 4 if source is None else torch.where(BY_KEY[:, 0] < 0, -7.0, BY_KEY[:, 0] / 4)
        held = torch.where(held < 0, -7.0, held)
        assert torch.equal(sums.tensor, held[slice(*cut[0][0])])
    whole = torch.full((6, 4), -7.0)
    fill(path, {"tables/new": torch.nn.Parameter(whole)}, {"tables/new": taken["tables/new"]}, World())
    assert torch.equal(whole, expected)


def clicks(users: list[str], seed: int) -> pd.DataFrame:
    """60 rows; users are the more frequent the later they come, so that vocabularies have another order."""
    draw = np.random.default_rng(seed)
    names = [user for at, user in enumerate(users) for _ in range(at + 1)]
    return pd.DataFrame(
        {
            "click": draw.integers(0, 2, 60),
            "age": draw.normal(size=60),
            "user": (names * 60)[:60],
            "site": [f"s{number}" for number in draw.integers(0, 9, 60)],
            "slot": draw.integers(0, 4, 60),
        }
    )


USERS = {"encoding": "vocabulary", "column": "user", "name": "user"}
SITES: dict[str, Any] = {"name": "site", "encoding": "hash", "num_embeddings": 16}
SLOTS: dict[str, Any] = {"name": "slot", "encoding": "id", "num_embeddings": 4}
DEEP: dict[str, Any] = {"name": "deep", "kind": "mlp", "params": {"hidden": [8], "out_dim": 4}}
STILL = 1e-30
"""A learning rate that moves nothing in float32."""


def trained(folder: Path, frame: pd.DataFrame, **changes: Any) -> dict[str, Tensor]:
    """Runs one configuration, changed by section, and returns what its newest checkpoint holds."""
    document: dict[str, Any] = {
        "data": {"kind": "pandas", "label": {"column": "click"}},
        "features": {"dense": ["age"], "sparse": [USERS, SITES, SLOTS]},
        "embedding": {"dim": 4, "backend": "torch"},
        "towers": [DEEP],
        "optimizer": {"dense": {"lr": STILL}, "sparse": {"lr": STILL}},
        "train": {"steps": 1, "local_batch_size": 20, "device": "cpu", "threads": 1},
        "run": {"dir": str(folder.parent), "name": folder.name},
    }
    for section, values in changes.items():
        document[section] = document.get(section, {}) | values if isinstance(values, dict) else values
    Trainer(Config.from_dict(document), train=frame).fit()
    return tensors_of(folder)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    path = RunFolder(folder).checkpoint(folder)
    found = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored_layout(path).items()}
    load(path, found)
    return found


def row_of(folder: Path, user: str) -> int:
    encoding = load_features(folder / "features").encodings[0]
    assert isinstance(encoding, Vocabulary)
    return 2 + encoding.categories.to_pylist().index(user)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learnt") / "old"
    rates = {"dense": {"lr": 0.1}, "sparse": {"lr": 0.1}}
    trained(
        folder, clicks(["ann", "bob", "cid", "dan"], 1), optimizer=rates, train={"steps": 3, "local_batch_size": 20}
    )
    return folder


def test_another_model_takes_what_it_shares_and_says_the_rest(
    learnt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = clicks(["eve", "dan", "bob"], 2)
    sparse = [
        USERS | {"name": "member"},
        SITES,
        SLOTS | {"num_embeddings": 7},
        SLOTS | {"name": "hour", "column": "slot"},
    ]
    features = {"dense": [{"name": "years", "column": "age"}], "sparse": sparse}
    towers = [DEEP | {"inputs": {"sparse": ["member", "site", "slot"]}}, DEEP | {"name": "wide"}]
    init = {
        "path": str(learnt),
        "rename": {"tables/user": "tables/member", "dense/age": "dense/years"},
        "missing": "init",
    }
    train = {"steps": 1, "local_batch_size": 20, "device": "cpu", "threads": 1}
    cold = trained(tmp_path / "cold", frame, features=features, towers=towers)
    capsys.readouterr()
    warm = trained(tmp_path / "warm", frame, features=features, towers=towers, train=train | {"init_from": init})
    said, old = capsys.readouterr().out, tensors_of(learnt)
    for user in ("dan", "bob"):
        there, here = row_of(learnt, user), row_of(tmp_path / "warm", user)
        assert torch.equal(warm["tables/member"][here], old["tables/user"][there])
    assert row_of(learnt, "bob") != row_of(tmp_path / "warm", "bob"), "its row has another number"
    eve = row_of(tmp_path / "warm", "eve")
    assert torch.equal(warm["tables/member"][eve], cold["tables/member"][eve])
    assert torch.equal(warm["tables/member"][:2], old["tables/user"][:2]), "missing and unseen"
    assert torch.equal(warm["tables/site"], old["tables/site"])
    assert torch.equal(warm["tables/slot"][:6], old["tables/slot"])
    assert torch.equal(warm["tables/slot"][6:], cold["tables/slot"][6:])
    assert torch.equal(warm["tables/hour"], cold["tables/hour"])
    dense = [name for name in warm if name.startswith("model/")]
    for name in dense:
        assert torch.equal(warm[name], (old if name.startswith("model/towers.deep.") else cold)[name]), name
    assert {name.split(".")[1] for name in dense if "towers" in name} == {"deep", "wide"}
    assert "tables/member: taken (4 rows by key; 1 new initialised, 2 of the checkpoint ignored)" in said
    assert "tables/slot: taken (6 rows by number; 3 new initialised)" in said
    assert "over_arch: initialised: it joins other towers" in said
    fates = json.loads((tmp_path / "warm" / "warm_start.json").read_text())
    assert fates["taken"]["tables/member"] == {"from": "tables/user", "rows": "by key"}
    assert {entry["from"] for entry in fates["taken"].values()} | fates["ignored"].keys() == old.keys()
    model = {name for name in warm if unit_of(name) is not None}
    assert fates["taken"].keys() | fates["initialised"].keys() == model


def test_optimizer_states_come_along_where_asked_for(learnt: Path, tmp_path: Path) -> None:
    frame = clicks(["ann", "bob", "cid", "dan"], 1)
    train = {"steps": 1, "local_batch_size": 20, "device": "cpu", "threads": 1}
    for optimizer, count in ((False, 1), (True, 4)):
        init = {"path": str(learnt / "checkpoints" / "step_00000003"), "optimizer": optimizer}
        found = trained(tmp_path / str(optimizer), frame, train=train | {"init_from": init})
        steps = {float(value) for name, value in found.items() if name.endswith("/step")}
        assert steps == {count}
        sums = torch.stack([value.sum() for name, value in found.items() if name.startswith("table_optimizer/user")])
        kept = tensors_of(learnt)["table_optimizer/user/sum"].sum()
        assert bool((sums >= kept).all()) == optimizer
        assert torch.equal(found["tables/user"], tensors_of(learnt)["tables/user"])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"features": {"sparse": [USERS, SITES | {"num_embeddings": 32}, SLOTS]}}, "tables/site: num_embeddings is 32"),
        (
            {"features": {"sparse": [USERS, SITES | {"encoding": "vocabulary", "num_embeddings": None}, SLOTS]}},
            "tables/site: encoding is vocabulary, in the checkpoint hash",
        ),
        ({"features": {"sparse": [SITES, USERS, SLOTS]}}, "towers.deep: it reads other features"),
        (
            {"features": {"dense": [{"name": "age", "transform": "none"}]}},
            "towers.deep: transform of dense/age is none, in the checkpoint log",
        ),
        ({"towers": [DEEP | {"name": "tall"}]}, "towers.tall: the checkpoint has none"),
        ({"over_arch": {"logits": "additive"}}, "over_arch.logits is additive, in the checkpoint none"),
    ],
)
def test_what_would_mean_something_else_is_refused_and_leaves_no_folder(
    learnt: Path, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    frame = clicks(["ann", "bob", "cid", "dan"], 1)
    train = {"steps": 1, "local_batch_size": 20, "init_from": {"path": str(learnt)}}
    with pytest.raises(UserError, match=problem):
        trained(tmp_path / "warm", frame, train=train, **({"over_arch": {}} | changes))
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_does_not_begin_again(learnt: Path, tmp_path: Path) -> None:
    source, folder, frame = tmp_path / "source", tmp_path / "warm", clicks(["ann", "bob", "cid", "dan"], 1)
    shutil.copytree(learnt, source)
    rates = {"dense": {"lr": 0.1}, "sparse": {"lr": 0.1}}
    train = {"steps": 1, "local_batch_size": 20, "init_from": {"path": str(source)}}
    first = trained(folder, frame, optimizer=rates, train=train)
    shutil.rmtree(source)
    with pytest.raises(UserError, match=r"train\.init_from\.path cannot change in a resumed run"):
        Trainer.resume(folder, ["train.init_from.path=elsewhere"], train=frame).fit()
    Trainer.resume(folder, ["train.steps=2"], train=frame).fit()
    second = tensors_of(folder)
    assert float(second["optimizer/over_arch.mlp.layers.0.weight/step"]) == 2
    assert not torch.equal(first["model/over_arch.mlp.layers.0.weight"], second["model/over_arch.mlp.layers.0.weight"])
