"""What the tests of schedules share: small real models, configurations as a user writes them, and plain autograd."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from erase_rec.batch import Batch, SparseBatch
from erase_rec.config.legality import RULES
from erase_rec.config.presets import apply_preset
from erase_rec.config.schema import Config
from erase_rec.dense_optimizer import DenseOptimizer
from erase_rec.distributed.replicated_tables import ReplicatedTables
from erase_rec.distributed.world import World
from erase_rec.finite import FiniteGuard
from erase_rec.protocols import Embeddings, LocalLoss
from erase_rec.schedule.gradients import GradientProgram, trained_blocks
from erase_rec.schedule.plan import Plan
from erase_rec.schedule.program import program
from erase_rec.schedule.reduction.build import make_reduction
from erase_rec.schedule.step import DENSE_BLOCK, ScheduledStep
from erase_rec.schedule.streams import RecordingStreams, Streams
from models.ctr_model import CTRModel, build_local_losses, build_model
from models.embeddings.layout import Table
from models.embeddings.torch_backend import TorchEmbeddings
from models.over_arch import OverArch

CPU = torch.device("cpu")
TABLES = [Table(name, rows, 4, mean=False) for name, rows in (("a", 11), ("b", 7), ("c", 5))]
DENSE = ("x", "y", "z")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "deep": ("mlp", {"hidden": (8,), "out_dim": 6}),
    "dot": ("dot_interaction", {"bottom_hidden": (8,), "hidden": (8,), "out_dim": 6}),
    "cross": ("dcn_v2", {"num_layers": 2, "rank": 3, "out_dim": 6}),
    "mask": ("masknet", {"mask_hidden": 8, "hidden": (8,), "out_dim": 6}),
    "attention": ("autoint", {"num_layers": 1, "num_heads": 2, "head_dim": 3, "out_dim": 6}),
    "pairs": ("fm", {"out_dim": 6}),
}
NAMES = tuple(KINDS)
State = dict[str, Tensor]


def tower(
    name: str,
    *reads: str,
    loss: float | None = 1.0,
    target: str = "own",
    objective: Mapping[str, Any] | None = None,
    **keys: Any,
) -> dict[str, Any]:
    """A tower's section; ``loss`` is its weight, ``objective`` its other keys, ``reads`` are the towers it reads."""
    kind, params = KINDS[name]
    declared = None if loss is None else {"weight": loss, "target": target} | dict(objective or {})
    return {"name": name, "kind": kind, "params": params, "inputs": {"towers": reads}, "loss": declared} | keys


def make_config(towers: Sequence[Mapping[str, Any]], **sections: Any) -> Config:
    """A configuration with its preset applied, which may break rules."""
    plain: dict[str, Any] = {
        "data": {"kind": "synthetic"},
        "features": {"dense": DENSE, "sparse": [table.name for table in TABLES]},
        "embedding": {"dim": 4},
        "over_arch": {"hidden": (8,), "logits": "additive"},
        "towers": towers,
        "schedule": {"preset": "erase"},
        "optimizer": {"dense": {"lr": 0.01, "eps": 1e-6}, "sparse": {"kind": "sgd", "lr": 0.1}},
        "train": {"steps": 1},
    }
    merged = {key: value | sections.get(key, {}) if isinstance(value, dict) else value for key, value in plain.items()}
    config, _ = apply_preset(Config.model_validate(merged | {"distributed": sections.get("distributed", {})}))
    return config


def refusals(config: Config) -> list[str]:
    """What the rules say of the configuration; features' settings aside, which these tests leave out."""
    found = [(finding.path, rule.message(finding)) for rule in RULES for finding in rule.find(config)]
    return [message for path, message in found if path[0] != "features"]


def make_model(config: Config, dtype: torch.dtype = torch.float64, world: World | None = None) -> CTRModel:
    """The model of ``config``, the same for every call; the ranks of a process group replicate its tables."""
    embeddings: Embeddings = TorchEmbeddings(TABLES, config.optimizer.sparse, seed=1, device=CPU, dtype=dtype)
    if world is not None and world.grouped:
        embeddings = ReplicatedTables(embeddings, world)
    return build_model(config, embeddings, CPU, dtype)


def make_batch(seed: int = 0, size: int = 9, dtype: torch.dtype = torch.float64) -> Batch:
    """Random rows."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.cat([torch.randint(0, table.rows, (size,), generator=generator) for table in TABLES])
    return Batch(
        torch.randn(size, len(DENSE), generator=generator, dtype=torch.float64).to(dtype),
        SparseBatch(values, torch.ones(3 * size, dtype=torch.int32), None, 3, single_valued=True),
        torch.randint(0, 2, (size,), generator=generator).to(dtype),
        torch.arange(size),
    )


def rank_share(batch: Batch, rank: int, size: int) -> Batch:
    """The rows of one of ``size`` ranks."""
    rows = torch.arange(batch.size).chunk(size)[rank]
    values = batch.sparse.values.reshape(3, -1)[:, rows].flatten()
    lengths = torch.ones(values.numel(), dtype=torch.int32)
    return Batch(batch.dense[rows], SparseBatch(values, lengths, None, 3, single_valued=True), batch.label[rows], rows)


def make_gradients(
    model: CTRModel,
    config: Config,
    world: World | None = None,
    streams: Streams | None = None,
    losses: Mapping[str, LocalLoss] | None = None,
) -> GradientProgram:
    """The gradient program of ``config`` as the command line builds it; on recording streams unless given."""
    world = world or World()
    plan = Plan.from_config(config, world.size)
    streams = streams or RecordingStreams(program(plan))
    blocks = trained_blocks(model, plan)
    reduction = make_reduction(plan, blocks, world, streams, chunk_mib=config.distributed.bucket_mib)
    return GradientProgram(
        model,
        plan,
        losses or build_local_losses(config),
        streams,
        device=CPU,
        reduction=reduction,
    )


def make_step(config: Config, gradients: GradientProgram) -> ScheduledStep:
    """A training step around ``gradients``."""
    dense = config.optimizer.dense
    apart = gradients.plan.optimizer == "per_tower" or dense.clip == "per_tower"
    blocks = gradients.blocks if apart else {DENSE_BLOCK: gradients.dense_parameters()}
    guard = FiniteGuard(lambda ids: [str(row) for row in ids.tolist()])
    return ScheduledStep(gradients, DenseOptimizer(dense, blocks), guard, dense.max_grad_norm)


def train(
    config: Config,
    batches: Sequence[Batch],
    dtype: torch.dtype = torch.float64,
    world: World | None = None,
    streams: Streams | None = None,
) -> State:
    """Parameters and tables after one step a batch; of several ranks each takes its share of the rows."""
    model = make_model(config, dtype, world)
    step = make_step(config, make_gradients(model, config, world, streams))
    for batch in batches:
        step(batch if world is None else rank_share(batch, world.rank, world.size))
    return state_of(model)


def state_of(model: CTRModel) -> State:
    """A copy of every parameter and table."""
    tables = {f"tables.{name}": weight for name, weight in model.embeddings.tables().items()}
    return {name: value.detach().clone() for name, value in (model.dense_state() | tables).items()}


def train_plainly(config: Config, batches: Sequence[Batch], dtype: torch.dtype = torch.float64) -> State:
    """What :func:`train` must equal: plain autograd and torch optimizers on whole batches, no schedule code."""
    model = make_model(config, dtype)
    blocks = plain_blocks(model, config)
    dense = config.optimizer.dense
    parameters = [parameter for block in blocks.values() for parameter in block.values()]
    optimizer: torch.optim.Optimizer
    if dense.kind == "adam":
        optimizer = torch.optim.Adam(parameters, lr=dense.lr, eps=dense.eps)
    else:
        assert dense.kind == "sgd"
        optimizer = torch.optim.SGD(parameters, lr=dense.lr, momentum=dense.momentum)
    clipped = [parameters] if dense.clip == "global" else [list(block.values()) for block in blocks.values()]
    for number, batch in enumerate(batches, start=1):
        every = config.schedule.exact_every
        exact = every is not None and number % every == 0
        gradients, pooled = plain_gradients(model, config, batch, exact=exact)
        for block in blocks.values():
            for name, parameter in block.items():
                parameter.grad = gradients[name]
        if dense.max_grad_norm is not None:
            for together in clipped:
                nn.utils.clip_grad_norm_(together, dense.max_grad_norm)
        optimizer.step()
        if pooled is not None:
            found = model.embeddings(batch.sparse)
            model.embeddings.backward_and_update(found, pooled, model.embeddings.order(batch.sparse))
    return state_of(model)


def plain_blocks(model: CTRModel, config: Config) -> dict[str, dict[str, nn.Parameter]]:
    """Trained parameters by block and checkpoint name."""
    modules: dict[str, nn.Module] = {f"towers.{entry.name}": model.tower(entry.name) for entry in config.towers}
    assert isinstance(model.over_arch, OverArch)
    modules["over_arch"] = model.over_arch
    blocks = {
        prefix: {f"{prefix}.{name}": value for name, value in module.named_parameters() if value.requires_grad}
        for prefix, module in modules.items()
    }
    return {prefix: block for prefix, block in blocks.items() if block}


def plain_gradients(
    model: CTRModel, config: Config, batch: Batch, *, exact: bool = False
) -> tuple[dict[str, Tensor | None], Tensor | None]:
    """Gradients of the parameters and of the pooled embeddings: a forward for the main loss, one for the local ones.

    ``exact``: nothing is cut.
    """
    if exact:
        towers = tuple(entry.model_copy(update={"detach": False}) for entry in config.towers)
        config = config.model_copy(update={"towers": towers})
    pooled = model.embeddings(batch.sparse).detach()
    main_leaf, local_leaf = pooled.clone().requires_grad_(), pooled.clone().requires_grad_()
    outputs, logits = _forward(model, config, batch, main_leaf)
    total = binary_cross_entropy_with_logits(model.over_arch(outputs, logits), batch.label)
    _, local_logits = _forward(model, config, batch, local_leaf, cut_logits=False)
    for position, entry in enumerate(config.towers):
        if entry.loss is None or entry.loss.weight == 0:
            continue
        logit = local_logits[position]
        if entry.loss.target == "joint":
            others = [other.detach() for at, other in enumerate(local_logits) if at != position]
            logit = logit + sum(others, torch.zeros_like(logit))
        loss = binary_cross_entropy_with_logits(logit, batch.label)
        if entry.loss.kind == "bce_pairwise":
            loss = loss + 0.1 * ranking_loss(logit, batch.label, shifts=8)
        total = total + entry.loss.weight * loss
    named = {name: value for block in plain_blocks(model, config).values() for name, value in block.items()}
    *found, main, local = torch.autograd.grad(total, [*named.values(), main_leaf, local_leaf], allow_unused=True)
    wanted = {"main": [main], "local": [local], "both": [main, local], "none": []}
    chosen = [part for part in wanted[config.schedule.embedding_gradient or "none"] if part is not None]
    return dict(zip(named, found, strict=True)), sum(chosen[1:], chosen[0]) if chosen else None


def ranking_loss(logit: Tensor, label: Tensor, shifts: int) -> Tensor:
    """Mean of -log sigmoid(clicked - not) over the pairs of rows 1 to ``shifts`` apart, round the batch's end."""
    size, terms = len(label), []
    for shift, row in itertools.product(range(1, shifts + 1), range(size)):
        other = (row - shift) % size
        if label[row] != label[other]:
            clicked, not_clicked = (row, other) if label[row] > label[other] else (other, row)
            terms.append(-torch.log(torch.sigmoid(logit[clicked] - logit[not_clicked])))
    return torch.stack(terms).mean() if terms else logit.new_zeros(())


def _forward(
    model: CTRModel, config: Config, batch: Batch, leaf: Tensor, *, cut_logits: bool = True
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs as their readers get them, and logits."""
    outputs: dict[str, Tensor] = {}
    logits: list[Tensor] = []
    for entry in config.towers:
        output, logit = model.tower(entry.name)(batch.dense, leaf, [outputs[name] for name in entry.inputs.towers])
        outputs[entry.name] = output.detach() if entry.detach else output
        logits.append(logit.detach() if entry.detach and cut_logits else logit)
    return list(outputs.values()), logits


def assert_same(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], tolerance: float) -> None:
    """Equal by name up to ``tolerance`` (relative above 1, absolute below); 0: bit for bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        other = found[name]
        assert (value is None) == (other is None), name
        if value is not None and other is not None:
            if tolerance == 0:
                assert torch.equal(other, value), name
            torch.testing.assert_close(
                other, value, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )
