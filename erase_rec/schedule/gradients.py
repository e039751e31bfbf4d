"""Interprets a plan's program up to the gradients. Every schedule goes through here.

Gradients inside a tower are exact. What a plan changes is where gradients are cut (``detach``), when a tower's
backward is launched (``early``), and on which stream its work runs. All gradients are taken with
``torch.autograd.grad``: no hooks and no ``AccumulateGrad`` nodes, whose stream would be fixed where they were
made; and each tower reads the pooled embeddings through a detached leaf of its own, so that backward passes of
different towers share nothing. The leaves' gradients are summed once, in tower order, and each table is updated
once a step.

Stages and streams: lookup, logit join, over-arch, aggregate backward, check and update run on the main stream;
a tower's forward, local loss and early backward on the tower's. Autograd runs a node's backward on the stream
of its forward and ends by letting the caller's current stream wait: an early backward is therefore called with
the tower's stream current, and main does not wait for it before the update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from erase_rec.batch import Batch
from erase_rec.protocols import CTRModel, LocalLoss, OverArch, TowerBlock
from erase_rec.schedule.plan import Op, Plan, TowerPlan, program
from erase_rec.schedule.streams import Streams


@dataclass
class Gradients:
    """Gradients of one batch, before clipping; owned by the caller.

    Attributes:
        parameters: by ``towers.<name>.<parameter>`` and ``over_arch.<parameter>``; None where no loss reaches.
        pooled: [B, E], for the pooled embeddings; None when ``embedding_gradient`` lets none through.
    """

    parameters: dict[str, Tensor | None]
    pooled: Tensor | None


@dataclass
class StepState:
    """Everything that one step makes. Kept until the step ends, because streams still read it."""

    batch: Batch
    pooled: Tensor = field(init=False)
    leaves: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    logits: dict[str, Tensor] = field(default_factory=dict)
    logit_sum: Tensor | None = None
    local_losses: dict[str, Tensor] = field(default_factory=dict)
    logit: Tensor = field(init=False)
    loss: Tensor = field(init=False)
    leaf_gradients: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


class GradientProgram:
    """Runs a plan's program up to the gradients; :mod:`erase_rec.schedule.step` updates with them."""

    def __init__(
        self,
        model: CTRModel,
        plan: Plan,
        losses: Mapping[str, LocalLoss],
        streams: Streams,
        *,
        device: torch.device,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        """Binds the plan to a model.

        Args:
            model: whose towers the plan names.
            plan: what to run.
            losses: local loss of each tower that has one in the plan.
            streams: where to run it.
            device: the model's device.
            autocast_dtype: dtype of towers and over-arch under autocast; None: no autocast.
        """
        self.model = model
        self.plan = plan
        self.device = device
        self._losses = losses
        self._streams = streams
        self._autocast_dtype = autocast_dtype
        self._program = program(plan)
        self._towers = {tower.name: model.tower(tower.name) for tower in plan.towers}
        self._parameters = {
            tower.name: named_parameters(self._towers[tower.name], f"towers.{tower.name}") for tower in plan.towers
        }
        self._over_arch_parameters = named_parameters(model.over_arch, "over_arch")
        self._run_op: dict[str, Callable[[StepState, Op], None]] = {
            "lookup": self._lookup,
            "forward": self._forward,
            "logit_join": self._logit_join,
            "early_backward": self._early_backward,
            "over_arch": self._over_arch,
            "backward": self._backward,
        }

    def dense_parameters(self) -> dict[str, nn.Parameter]:
        """Dense parameters by the names that :class:`Gradients` uses, towers first."""
        merged: dict[str, nn.Parameter] = {}
        for parameters in self._parameters.values():
            merged |= parameters
        return merged | self._over_arch_parameters

    def run(self, batch: Batch, finish: Mapping[str, Callable[[StepState, Op], None]]) -> StepState:
        """Runs the program; ``finish`` does the operations that need an optimizer (``check``, ``update``).

        Args:
            batch: rows on the model's device.
            finish: by operation kind; kinds that it leaves out are not run.
        """
        state = StepState(batch)
        handlers = self._run_op | dict(finish)
        for op in self._program:
            handler = handlers.get(op.kind)
            if handler is not None:
                with self._streams.run(op):
                    handler(state, op)
        return state

    def gradients(self, batch: Batch) -> Gradients:
        """Gradients of ``batch`` without any update; ready on the main stream."""
        # An empty check waits for the early backwards as the real one does.
        state = self.run(batch, {"check": lambda state, op: None})
        return Gradients(dict(state.gradients), self.pooled_gradient(state))

    def pooled_gradient(self, state: StepState) -> Tensor | None:
        """Sum of the leaves' gradients in tower order, [B, E]; None when no leaf has one."""
        gradients = [
            state.leaf_gradients[tower.name] for tower in self.plan.towers if tower.name in state.leaf_gradients
        ]
        if not gradients:
            return None
        total = gradients[0]
        for gradient in gradients[1:]:
            total = total + gradient
        return total

    def _autocast(self) -> torch.autocast:
        # The cache of cast weights is shared between streams; a cast made on one and read on another is a race.
        return torch.autocast(
            self.device.type,
            dtype=self._autocast_dtype or torch.bfloat16,
            enabled=self._autocast_dtype is not None,
            cache_enabled=False,
        )

    def _lookup(self, state: StepState, op: Op) -> None:
        state.pooled = self.model.embeddings(state.batch.sparse)

    def _forward(self, state: StepState, op: Op) -> None:
        assert op.tower is not None
        leaf = state.pooled.detach()
        if self._leaf_needs_gradient(self.plan.tower(op.tower)):
            leaf.requires_grad_()
        with self._autocast():
            output, logit = self._towers[op.tower](state.batch.dense, leaf)
        state.leaves[op.tower], state.outputs[op.tower], state.logits[op.tower] = leaf, output, logit

    def _leaf_needs_gradient(self, tower: TowerPlan) -> bool:
        """Whether a loss that may train the tables reaches this tower."""
        from_main = not tower.detach and self.plan.embedding_gradient in {"main", "both"}
        # A tower that is not detached sees no other tower's local loss: every target cuts the others' logits.
        from_local = tower.loss is not None and self.plan.embedding_gradient in {"local", "both"}
        return from_main or from_local

    def _logit_join(self, state: StepState, op: Op) -> None:
        total: Tensor | None = None
        for logit in state.logits.values():
            total = logit.detach() if total is None else total + logit.detach()
        state.logit_sum = total

    def _local_loss(self, state: StepState, tower: TowerPlan) -> Tensor:
        """The tower's loss before its weight; its graph ends at the tower's leaf and parameters."""
        assert tower.loss is not None
        logit = state.logits[tower.name]
        if tower.loss.target == "joint":
            assert state.logit_sum is not None
            logit = logit + (state.logit_sum - logit.detach())
        loss = self._losses[tower.name](logit, state.batch.label)
        state.local_losses[tower.name] = loss
        return tower.loss.weight * loss

    def _early_backward(self, state: StepState, op: Op) -> None:
        assert op.tower is not None
        tower = self.plan.tower(op.tower)
        loss = self._local_loss(state, tower)
        leaf = state.leaves[op.tower]
        self._take(state, loss, [op.tower] if leaf.requires_grad else [], self._parameters[op.tower])

    def _over_arch(self, state: StepState, op: Op) -> None:
        outputs, logits = [], []
        for tower in self.plan.towers:
            output, logit = state.outputs[tower.name], state.logits[tower.name]
            outputs.append(output.detach() if tower.detach else output)
            logits.append(logit.detach() if tower.detach else logit)
        with self._autocast():
            state.logit = self.model.over_arch(outputs, logits)
        state.loss = binary_cross_entropy_with_logits(state.logit, state.batch.label.to(state.logit.dtype))

    def _backward(self, state: StepState, op: Op) -> None:
        """Aggregate backward: the main loss and every local loss that was not launched early, in one call."""
        rest = [tower for tower in self.plan.towers if not tower.early]
        parameters = dict(self._over_arch_parameters)
        for tower in rest:
            parameters |= self._parameters[tower.name]
        local: Tensor | None = None
        for tower in rest:
            if tower.loss is not None:
                loss = self._local_loss(state, tower)
                local = loss if local is None else local + loss
        total = state.loss if local is None else state.loss + local
        leaves = [tower.name for tower in rest if state.leaves[tower.name].requires_grad]
        chosen = {"both": total, "main": state.loss, "local": local, "none": None}[self.plan.embedding_gradient]
        if chosen is total:
            self._take(state, total, leaves, parameters)
            return
        if leaves and chosen is not None:
            self._take(state, chosen, leaves, {}, retain_graph=True)
        self._take(state, total, [], parameters)

    def _take(
        self,
        state: StepState,
        loss: Tensor,
        leaves: Sequence[str],
        parameters: Mapping[str, nn.Parameter],
        retain_graph: bool = False,
    ) -> None:
        """Gradients of ``loss`` for the named leaves and the parameters; a leaf that it does not reach gets none."""
        inputs = [state.leaves[name] for name in leaves] + list(parameters.values())
        gradients = torch.autograd.grad(loss, inputs, retain_graph=retain_graph, allow_unused=True)
        for name, gradient in zip(leaves, gradients[: len(leaves)], strict=True):
            if gradient is not None:
                state.leaf_gradients[name] = gradient
        state.gradients.update(zip(parameters, gradients[len(leaves) :], strict=True))


def named_parameters(module: TowerBlock | OverArch, prefix: str) -> dict[str, nn.Parameter]:
    """Parameters of a tower block or over-arch by ``prefix.<name>``."""
    assert isinstance(module, nn.Module)
    return {f"{prefix}.{name}": parameter for name, parameter in module.named_parameters()}
