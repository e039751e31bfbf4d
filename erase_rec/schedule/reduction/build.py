"""Chooses the reduction that a plan names."""

from __future__ import annotations

from erase_rec.distributed.world import World
from erase_rec.schedule.plan import Plan
from erase_rec.schedule.reduction.bucket import BucketReduction
from erase_rec.schedule.reduction.ddp import DdpPerTowerReduction, DdpReduction
from erase_rec.schedule.reduction.reduction import Blocks, NoReduction, Reduction
from erase_rec.schedule.streams import Streams


def make_reduction(plan: Plan, blocks: Blocks, world: World, streams: Streams, *, chunk_mib: float) -> Reduction:
    """The reduction of ``plan`` over ``blocks``.

    Args:
        plan: names the reduction.
        blocks: trained parameters.
        world: the ranks; with a process group for ``ddp`` and ``ddp_per_tower``.
        streams: those that the plan runs on.
        chunk_mib: ``distributed.bucket_mib``.
    """
    match plan.reduction:
        case None:
            return NoReduction(blocks)
        case "bucket":
            return BucketReduction(blocks, world, chunk_mib=chunk_mib)
        case "ddp":
            return DdpReduction(blocks, plan, streams)
        case "ddp_per_tower":
            return DdpPerTowerReduction(blocks, plan, streams)
