"""Reductions in one process: where gradients are held, in which order they are asked for, what each refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from schedule_cases import make_batch, make_config, make_gradients, make_model, tower
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from erase_rec.config.schema import Config
from erase_rec.distributed.launch import join_world
from erase_rec.distributed.world import World
from erase_rec.schedule.plan import OVER_ARCH, Plan
from erase_rec.schedule.reduction.bucket import MIB, BucketReduction
from erase_rec.schedule.reduction.ddp import DdpPerTowerReduction, DdpReduction
from erase_rec.schedule.reduction.reduction import NoReduction
from models.over_arch import OverArch

TOWERS = [tower("deep"), tower("dot", target="joint"), tower("cross", detach=False, loss=None)]


@pytest.fixture
def world() -> Iterator[World]:
    """One rank with a process group."""
    with join_world(on_cuda=False, timeout_s=30, grouped=True) as world:
        yield world


def grad(loss, inputs):  # type: ignore[no-untyped-def]
    return torch.autograd.grad(loss, inputs, allow_unused=True)


def linear_blocks() -> dict[str, dict[str, nn.Parameter]]:
    torch.manual_seed(0)
    return {
        block: {f"{block}.{name}": parameter for name, parameter in nn.Linear(*shape).named_parameters()}
        for block, shape in {"deep": (3, 2), OVER_ARCH: (4, 5)}.items()
    }


def config_of(dispatch: str, **distributed: object) -> Config:
    return make_config(TOWERS, schedule={"dispatch": dispatch}, distributed=distributed)


def test_the_plan_names_the_reduction(world: World) -> None:
    kinds = {None: NoReduction, "bucket": BucketReduction, "ddp": DdpReduction, "ddp_per_tower": DdpPerTowerReduction}
    for name, kind in kinds.items():
        config = config_of("blocking", reduction=name)
        assert type(make_gradients(make_model(config), config, world).reduction) is kind


def test_several_ranks_reduce_buckets_unless_told_otherwise() -> None:
    assert Plan.from_config(config_of("blocking"), world_size=2).reduction == "bucket"
    assert Plan.from_config(config_of("blocking", reduction="ddp"), world_size=2).reduction == "ddp"
    assert Plan.from_config(config_of("blocking"), world_size=1).reduction is None


@pytest.mark.parametrize("dispatch", ["blocking", "non_blocking"])
def test_buckets_are_asked_for_in_the_order_of_the_program(world: World, dispatch: str) -> None:
    """Early towers first, then what the aggregate backward leaves; the over-arch in chunks of whole parameters."""
    config = config_of(dispatch, reduction="bucket", bucket_mib=8 * 16 / MIB)
    make_gradients(make_model(config), config, world).gradients(make_batch())
    entries = [(entry.group, entry.numel) for entry in world.collectives.recent]
    over_arch = make_model(config).over_arch
    assert isinstance(over_arch, OverArch)
    sizes = {name: parameter.numel() for name, parameter in over_arch.named_parameters()}
    assert [group for group, _ in entries] == ["deep.0", "dot.0", "cross.0", *(f"over_arch.{at}" for at in range(3))]
    assert [numel for group, numel in entries if group.startswith("over_arch")] == [
        sizes["mlp.layers.0.weight"],
        sizes["mlp.layers.0.bias"] + sizes["head.linear.weight"],
        sizes["head.linear.bias"],
    ]


def test_buckets_hold_the_sum_over_micro_batches_and_none_where_no_loss_reaches(world: World) -> None:
    blocks = linear_blocks()
    reduction = BucketReduction(blocks, world, chunk_mib=25)
    weight, bias = blocks["deep"].values()
    for factors in ((2.0, 3.0), (5.0, 7.0)):
        reduction.begin()
        for factor in factors:
            reduction.differentiate(factor * weight.sum(), [], ["deep"], grad=grad, last=False)
        reduction.start("deep")
        reduction.wait("deep")
        found = reduction.gradient("deep", "deep.weight")
        assert found is not None
        assert torch.equal(found, torch.full_like(weight, sum(factors)))
        assert reduction.gradient("deep", "deep.bias") is None
        assert reduction.gradient(OVER_ARCH, "over_arch.weight") is None
    reduction.begin()
    reduction.differentiate(bias.sum(), [], ["deep"], grad=grad, last=False)
    reduction.start("deep")
    reduction.wait("deep")
    assert reduction.gradient("deep", "deep.weight") is None, "of the step before"
    assert all(bool((flat != 0).sum() == bias.numel()) for flat, _ in reduction._chunks["deep"])


@pytest.mark.parametrize("kind", ["ddp", "ddp_per_tower"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_when_ddp_starts_to_reduce(
    world: World, kind: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One a tower: right after an early backward, inside the model's forward. One for all: in the main backward.

    Each once a step, of the last micro-batch.
    """
    order: list[str] = []
    train = {"steps": 1, "micro_batches": micro_batches}
    config = make_config(TOWERS, distributed={"reduction": kind}, train=train)
    model = make_model(config)
    gradients = make_gradients(model, config, world)
    assert isinstance(gradients.reduction, DdpReduction | DdpPerTowerReduction)
    wrapped = gradients.reduction._ddp

    def hook(name, bucket):  # type: ignore[no-untyped-def] # DDP refuses annotations that are text
        order.append(name)
        return allreduce_hook(dist.group.WORLD, bucket)

    for name, ddp in wrapped.items() if isinstance(wrapped, dict) else [("all", wrapped)]:
        ddp.register_comm_hook(name, hook)
    assert isinstance(model.over_arch, OverArch)
    over_arch_forward = model.over_arch.forward
    monkeypatch.setattr(
        model.over_arch, "forward", lambda *inputs: (order.append("forward"), over_arch_forward(*inputs))[1]
    )
    gradients.gradients(make_batch())
    assert order[: micro_batches - 1] == ["forward"] * (micro_batches - 1)
    last = order[micro_batches - 1 :]
    if kind == "ddp":
        assert last == ["forward", "all"]
    else:
        assert last[:3] == ["deep", "dot", "forward"]
        assert sorted(last[3:]) == sorted(["cross", OVER_ARCH])
