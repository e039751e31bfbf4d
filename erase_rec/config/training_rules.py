"""Rules on schedule, optimizers and the loop."""

from __future__ import annotations

from collections.abc import Iterator

from erase_rec.best_metric import COSTS
from erase_rec.config.document import KeyPath
from erase_rec.config.merge import ALTERNATIVES
from erase_rec.config.parameters_beside import hindrance
from erase_rec.config.rules import Finding, Rule
from erase_rec.config.schema import Config
from erase_rec.config.tower_rules import has_loss
from erase_rec.errors import nearest

TRAIN: KeyPath = ("train",)
DENSE: KeyPath = ("optimizer", "dense")


def _nothing_early(config: Config) -> Iterator[Finding]:
    if config.schedule.early_backward and not any(tower.detach and not tower.frozen for tower in config.towers):
        found = "is true and no tower is detached and trained"
        yield Finding(("schedule", "early_backward"), found, also=(("towers",), ("schedule", "preset")))


def _nothing_dispatched(config: Config) -> Iterator[Finding]:
    if config.schedule.dispatch == "non_blocking" and config.schedule.early_backward is False:
        found = "is non_blocking and early_backward is false"
        yield Finding(("schedule", "dispatch"), found, also=(("schedule", "early_backward"), ("schedule", "preset")))


def _nothing_captured(config: Config) -> Iterator[Finding]:
    if config.schedule.cuda_graph == "tower" and config.schedule.early_backward is False:
        found = "is tower and early_backward is false"
        yield Finding(("schedule", "cuda_graph"), found, also=(("schedule", "early_backward"), ("schedule", "preset")))


def _dispatched_in_a_step_graph(config: Config) -> Iterator[Finding]:
    captured = config.schedule.cuda_graph
    if captured in {"dense", "step"} and config.schedule.dispatch == "non_blocking":
        found = f"is non_blocking and cuda_graph is {captured}"
        yield Finding(("schedule", "dispatch"), found, also=(("schedule", "cuda_graph"), ("schedule", "preset")))


def _strict_about_nothing(config: Config) -> Iterator[Finding]:
    if config.schedule.strict and config.schedule.cuda_graph == "none":
        also = (("schedule", "cuda_graph"), ("schedule", "preset"))
        yield Finding(("schedule", "strict"), "is true and cuda_graph is none", also=also)


def _autotuned_nothing(config: Config) -> Iterator[Finding]:
    schedule = config.schedule
    if schedule.autotune and schedule.cuda_graph != "step":
        also = (("schedule", "cuda_graph"), ("schedule", "preset"))
        yield Finding(("schedule", "autotune"), f"is true and cuda_graph is {schedule.cuda_graph}", also=also)


def _autotuned_what_is_said(config: Config) -> Iterator[Finding]:
    chosen = {"launch_order": (), "high_priority": (), "parameters_beside": False, "matmul_share": 1.0}
    for key, left_out in chosen.items():
        if config.schedule.autotune and getattr(config.schedule, key) != left_out:
            yield Finding(("schedule", key), "is given and autotune is true", also=(("schedule", "autotune"),))


def _nothing_beside(config: Config) -> Iterator[Finding]:
    found = hindrance(config)
    if config.schedule.parameters_beside and found is not None:
        yield Finding(("schedule", "parameters_beside"), f"is true and {found}", also=(("schedule", "cuda_graph"),))


def _clipped_together(config: Config) -> Iterator[Finding]:
    dense = config.optimizer.dense
    if config.schedule.optimizer == "per_tower" and dense.max_grad_norm is not None and dense.clip == "global":
        found = "is global, with max_grad_norm and schedule.optimizer: per_tower"
        also = ((*DENSE, "max_grad_norm"), ("schedule", "optimizer"), ("schedule", "preset"))
        yield Finding((*DENSE, "clip"), found, also)


def _clipped_to_nothing(config: Config) -> Iterator[Finding]:
    dense = config.optimizer.dense
    if dense.clip == "per_tower" and dense.max_grad_norm is None:
        yield Finding((*DENSE, "clip"), "is per_tower without max_grad_norm", also=((*DENSE, "max_grad_norm"),))


def _empty_micro_batches(config: Config) -> Iterator[Finding]:
    train = config.train
    if train.micro_batches > train.local_batch_size:
        found = f"a batch of {train.local_batch_size} rows cannot be cut into {train.micro_batches} parts"
        yield Finding((*TRAIN, "micro_batches"), found, also=((*TRAIN, "local_batch_size"),))


def _untrained_tables(config: Config) -> Iterator[Finding]:
    path = ("schedule", "embedding_gradient")
    mode, towers = config.schedule.embedding_gradient, config.towers
    if not config.features.sparse:
        return
    has_local, all_detached = any(map(has_loss, towers)), all(tower.detach for tower in towers)
    if mode == "main" and all_detached:
        yield Finding(path, "is main and every tower is detached", also=(("towers",), ("schedule", "preset")))
    if mode == "local" and not has_local:
        yield Finding(path, "is local and no tower has a loss of weight above 0", also=(("towers",),))
    if mode == "both" and not has_local and all(tower.detach and tower.frozen for tower in towers):
        found, way_out = "is both and every tower is detached and frozen", "use embedding_gradient: none"
        yield Finding(path, found, also=(("towers",), ("schedule", "preset")), way_out=way_out)


def _durations(config: Config) -> Iterator[Finding]:
    keys = ALTERNATIVES[TRAIN]
    given = [key for key in keys if getattr(config.train, key) is not None]
    if not given:
        yield Finding(TRAIN, f"none of {', '.join(keys)} is given", also=tuple((*TRAIN, key) for key in keys))
    elif len(given) > 1:
        found = f"is given beside {' and '.join(given[:-1])}"
        yield Finding((*TRAIN, given[-1]), found, also=tuple((*TRAIN, key) for key in given))


def _unwatchable(config: Config) -> Iterator[Finding]:
    watched: list[tuple[KeyPath, str]] = []
    if config.train.early_stopping is not None:
        watched.append((("train", "early_stopping", "metric"), config.train.early_stopping.metric))
    if config.optimizer.lr_schedule.kind == "plateau":
        watched.append((("optimizer", "lr_schedule", "metric"), config.optimizer.lr_schedule.metric))
    for path, metric in watched:
        if metric not in COSTS:
            yield Finding(path, f"found {metric!r}", hint=nearest(metric, tuple(COSTS)))


def _stepless(config: Config) -> Iterator[Finding]:
    schedule = config.optimizer.lr_schedule
    if schedule.kind == "step" and schedule.step_every is None:
        section = ("optimizer", "lr_schedule")
        yield Finding((*section, "step_every"), "kind: step needs step_every", also=((*section, "kind"),))


def _exact_of_nothing(config: Config) -> Iterator[Finding]:
    if config.schedule.exact_every is not None and not any(tower.detach for tower in config.towers):
        also = (("towers",), ("schedule", "preset"))
        yield Finding(("schedule", "exact_every"), "is given and no tower is detached", also=also)


def _exact_under_a_reducer(config: Config) -> Iterator[Finding]:
    reduction = config.distributed.reduction
    if config.schedule.exact_every is not None and reduction in {"ddp", "ddp_per_tower"}:
        also = (("distributed", "reduction"), ("schedule", "preset"))
        yield Finding(("schedule", "exact_every"), f"is given and distributed.reduction is {reduction}", also=also)


TRAINING_RULES = (
    Rule(
        "`early_backward: true` with no tower that is detached and not frozen",
        "a tower whose output is not cut has to wait for the over-arch's gradient",
        "set detach: true for a tower, or early_backward: false",
        _nothing_early,
    ),
    Rule(
        "`dispatch: non_blocking` with `early_backward: false`",
        "it says who launches early backwards",
        "use dispatch: blocking, or early_backward: true",
        _nothing_dispatched,
    ),
    Rule(
        "`cuda_graph: tower` with `early_backward: false`",
        "it captures towers that are launched early",
        "use cuda_graph: none, or early_backward: true",
        _nothing_captured,
    ),
    Rule(
        "`cuda_graph: step` or `dense` with `dispatch: non_blocking`",
        "the host launches one graph, and no worker has anything to launch",
        "use dispatch: blocking, or cuda_graph: tower",
        _dispatched_in_a_step_graph,
    ),
    Rule(
        "`schedule.strict: true` with `cuda_graph: none`",
        "it refuses steps that are not replayed",
        "leave strict out, or use cuda_graph: step, dense or tower",
        _strict_about_nothing,
    ),
    Rule(
        "`schedule.autotune: true` without `cuda_graph: step`",
        "it measures captured steps",
        "use cuda_graph: step, or leave autotune out",
        _autotuned_nothing,
    ),
    Rule(
        "`schedule.autotune: true` with a `launch_order`, `high_priority`, `parameters_beside` or `matmul_share`",
        "it chooses them",
        "leave out one of them",
        _autotuned_what_is_said,
    ),
    Rule(
        "`schedule.parameters_beside: true` without captured steps over several streams, or with micro-batches, DDP or "
        "`model.compile`",
        "parameters' gradients would be read before they are joined, or nothing would run beside anything",
        "leave parameters_beside out, or use cuda_graph: step, towers' own streams and reduction: bucket",
        _nothing_beside,
    ),
    Rule(
        "`schedule.exact_every` with no detached tower",
        "nothing is cut in any step",
        "leave exact_every out, or set detach: true for a tower",
        _exact_of_nothing,
    ),
    Rule(
        "`schedule.exact_every` with `distributed.reduction: ddp` or `ddp_per_tower`",
        "a reducer of DDP is built for one kind of step: it would wait for gradients in another order",
        "use distributed.reduction: bucket",
        _exact_under_a_reducer,
    ),
    Rule(
        "a global `clip` with `schedule.optimizer: per_tower`",
        "a tower is updated before the other towers' gradients are known",
        "use optimizer.dense.clip: per_tower, or schedule.optimizer: end",
        _clipped_together,
    ),
    Rule(
        "`clip: per_tower` without `max_grad_norm`",
        "nothing would be clipped",
        "give optimizer.dense.max_grad_norm, or leave clip out",
        _clipped_to_nothing,
    ),
    Rule(
        "more `train.micro_batches` than rows in a batch",
        "each part needs a row",
        "use train.micro_batches of at most train.local_batch_size",
        _empty_micro_batches,
    ),
    Rule(
        "`embedding_gradient: main` with every tower detached, `local` with no local loss, or `both` with neither",
        "no gradient would reach the tables",
        "use embedding_gradient: both (or none, to keep the tables as they are)",
        _untrained_tables,
    ),
    Rule(
        "not exactly one of `train.steps`, `train.epochs` and `train.samples`",
        "exactly one says how long to train",
        "give one of train.steps, train.epochs and train.samples",
        _durations,
    ),
    Rule(
        "a watched metric that evaluation does not give",
        "expected one of " + ", ".join(COSTS),
        "",
        _unwatchable,
    ),
    Rule(
        "`lr_schedule.kind: step` without `step_every`",
        "it says how many steps lie between two multiplications",
        "give optimizer.lr_schedule.step_every",
        _stepless,
    ),
)
