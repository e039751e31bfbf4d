"""Where gradients that only parameters need can run beside a backward (``schedule.parameters_beside``)."""

from __future__ import annotations

from erase_rec.config.schema import Config


def hindrance(config: Config) -> str | None:
    """What keeps them inside, with the preset applied; None: nothing does.

    A step that the host launches pays for their launches; DDP's hooks and sums over micro-batches read them at once;
    compiled code launches by itself.
    """
    if config.schedule.cuda_graph not in {"dense", "step"}:
        return f"schedule.cuda_graph is {config.schedule.cuda_graph}"
    if all(tower.stream == "main" for tower in config.towers):
        return "all towers are on the main stream"
    if config.train.micro_batches > 1:
        return f"train.micro_batches is {config.train.micro_batches}"
    if config.distributed.reduction in {"ddp", "ddp_per_tower"}:
        return f"distributed.reduction is {config.distributed.reduction}"
    return "model.compile is true" if config.model.compile else None
