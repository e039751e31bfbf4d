"""A cut inside a tower: the layers above are the same layers, and the over-arch's loss trains them, no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from schedule_cases import make_batch, make_config, make_gradients, make_model, tower
from torch import nn

from erase_rec.api.assembly import ContentCatalog
from erase_rec.cli.data_catalog import DataCatalog
from erase_rec.config.load import load_config
from erase_rec.errors import ConfigError
from erase_rec.schedule.audit import audit
from erase_rec.schedule.plan import MAIN_LOSS, OVER_ARCH, Plan
from models.ctr_model import build_local_losses
from models.layers import MLP, RowTolerantBatchNorm
from models.registry import TOWERS, component

DIMS = (4, 4, 4)
LAYERS: dict[str, dict[str, Any]] = {
    "mlp": {"hidden": (8, 7), "out_dim": 6},
    "dot_interaction": {"hidden": (8, 7), "out_dim": 6},
    "masknet": {"mask_hidden": 8, "hidden": (8, 7), "out_dim": 6},
}


def built(kind: str) -> tuple[Any, Any]:
    torch.manual_seed(3)
    cls = component("tower", kind)
    config = cls.Config(**LAYERS.get(kind, {"out_dim": 6} if "out_dim" in cls.Config.model_fields else {"dim": 4}))
    return cls(config, 4, DIMS).double(), config


@pytest.mark.parametrize("kind", TOWERS)
def test_what_is_lifted_and_what_is_left_are_the_tower(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    dense = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    emb = torch.randn(5, sum(DIMS), generator=generator, dtype=torch.float64)
    whole, config = built(kind)
    for layers in range(1, config.liftable + 1):
        lower, _ = built(kind)
        upper = lower.lift(layers)
        below = lower(dense, emb)
        assert below.shape == (5, lower.out_dim)
        torch.testing.assert_close(upper(below), whole(dense, emb), rtol=1e-12, atol=1e-12)
        parts = sum(value.numel() for part in (lower, upper) for value in part.parameters())
        assert parts == sum(value.numel() for value in whole.parameters())
        assert min(sum(value.numel() for value in part.parameters()) for part in (lower, upper)) > 0


def test_towers_that_can_be_cut_inside() -> None:
    assert {kind: built(kind)[1].liftable for kind in TOWERS} == {
        "mlp": 2,
        "dot_interaction": 2,
        "masknet": 2,
        "dcn_v2": 1,
        "autoint": 1,
        "deepfm": 1,
        "cin": 1,
        "fm": 0,
        "bilinear": 0,
        "transformer": 0,
    }


def test_a_layer_takes_its_norm_and_dropout_along() -> None:
    mlp = MLP(4, (6, 5, 3), dropout=0.5, batch_norm=True)
    top = mlp.lift(2)
    assert [type(layer) for layer in top.layers] == 2 * [nn.Linear, RowTolerantBatchNorm, nn.ReLU, nn.Dropout]
    assert (mlp.out_dim, top.out_dim, len(mlp.layers)) == (6, 3, 4)


def test_the_over_arch_trains_what_is_above_the_cut_and_the_local_loss_what_is_below() -> None:
    config = make_config([tower("deep", cut_at=1), tower("dot")])
    model, batch = make_model(config), make_batch()
    plan, losses = Plan.from_config(config), build_local_losses(config)
    report = audit(model, plan, losses, batch)
    assert report.findings == ()
    assert {block: set(norms) for block, norms in report.norms.items()} == {
        "deep": {"deep"},
        "dot": {"dot"},
        OVER_ARCH: {MAIN_LOSS},
        "embeddings": {"deep", "dot"},
    }
    found = make_gradients(model, config).gradients(batch).parameters
    assert found["over_arch.lifted.0.layers.0.weight"] is not None
    assert found["over_arch.lifted.0.layers.0.weight"].shape == (6, 8)
    assert found["towers.deep.head.linear.weight"].shape == (1, 8)  # type: ignore[union-attr]


def test_the_uncut_model_starts_with_the_same_weights() -> None:
    cut, whole = (make_model(make_config([tower("deep", cut_at=layers)])).dense_state() for layers in (1, 0))
    assert torch.equal(cut["over_arch.lifted.0.layers.0.weight"], whole["towers.deep.tower.mlp.layers.2.weight"])
    assert torch.equal(cut["over_arch.mlp.layers.0.weight"], whole["over_arch.mlp.layers.0.weight"])


def test_a_cut_below_the_first_layer_is_refused_with_the_most_that_can_be_above() -> None:
    with pytest.raises(
        ConfigError, match=r"towers\.deep\.cut_at: found 3; a mlp of this size can have at most 2 layer"
    ):
        load_config("ctr_erase.yaml", ["towers.deep.cut_at=3"], catalog=ContentCatalog())
    # Preparing rows loads no towers, and leaves their sizes to training.
    load_config("ctr_erase.yaml", ["towers.deep.cut_at=2"], catalog=DataCatalog())
