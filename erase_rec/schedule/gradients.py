"""Interprets a plan's program up to the reduced gradients. Every schedule goes through here.

Gradients inside a tower are exact. What a plan changes is where gradients are cut (``detach``), when and by which
thread a tower's backward is launched (``early``, ``dispatch``), on which stream its work runs, and how gradients are
averaged over the ranks (``reduction``). Each tower reads the pooled embeddings through a detached leaf of its own, so
that backward passes of different towers share nothing; the leaves' gradients are summed once, in tower order, and each
table is updated once a step.

Stages and streams: lookup, logit join, over-arch, aggregate backward and check run on the main stream; a tower's
forward, local loss, early backward, reduction and own update on the tower's; what the tables' update needs of the ids
alone, and the metrics' sums, beside them all. Autograd runs a node's backward on the
stream of its forward and ends by letting the caller's current stream wait: an early backward is therefore called with
the tower's stream current. In captured steps over several streams, gradients that only a block's parameters need run
beside its backward (:mod:`erase_rec.parameter_stream`), and are joined where they are reduced or updated with.

With micro-batches the lookup is still one for the whole batch; each part has leaves of its own, and its losses are
weighted by its share of the rows, so that the sum is the gradient of the whole batch's mean loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from erase_rec.batch import Batch
from erase_rec.kernels.cross_entropy import cross_entropy
from erase_rec.kernels.ordered_sum import ordered_sum
from erase_rec.kernels.unit import unit_gradient
from erase_rec.parameter_stream import CudaParameterStream, ParameterStream, beside
from erase_rec.protocols import CTRModel, LocalLoss, OverArch, TowerBlock
from erase_rec.schedule.dispatch import BlockingDispatch, Dispatch, make_dispatch
from erase_rec.schedule.plan import MAIN_LOSS, OVER_ARCH, Plan, TowerPlan
from erase_rec.schedule.program import Op, Parts
from erase_rec.schedule.reduction.reduction import NoReduction, Reduction
from erase_rec.schedule.step_state import MicroState, StepState, total_of, whole
from erase_rec.schedule.streams import Streams
from erase_rec.schedule.tower_graphs import Graphs, NoGraphs, make_graphs
from erase_rec.schedule.tower_state import IllegalTransitionError, Phase, TowerStates
from erase_rec.schedule.way import Way


@dataclass
class Gradients:
    """Gradients of one batch, before clipping; owned by the caller.

    Attributes:
        parameters: by ``towers.<name>.<parameter>`` and ``over_arch.<parameter>``; None where no loss reaches.
        pooled: [B, E], for the pooled embeddings; None when ``embedding_gradient`` lets none through.
    """

    parameters: dict[str, Tensor | None]
    pooled: Tensor | None


Handler = Callable[[StepState, Op], None]
"""Does an operation, on its stream and on the thread that launches it."""


class GradientProgram:
    """Runs a plan's program up to the gradients; :mod:`erase_rec.schedule.step` updates with them.

    Attributes:
        plan: what is run.
        blocks: trained parameters by block and name; frozen blocks are absent.
        reduction: holds the gradients.
    """

    def __init__(
        self,
        model: CTRModel,
        plan: Plan,
        losses: Mapping[str, LocalLoss],
        streams: Streams,
        *,
        device: torch.device,
        reduction: Reduction | None = None,
        dispatch: Dispatch | None = None,
        graphs: Graphs | None = None,
        forwards: Mapping[str, Callable[..., Any]] | None = None,
        parameter_streams: Mapping[str, ParameterStream] | None = None,
    ) -> None:
        """Binds the plan to a model.

        Args:
            model: whose towers the plan names.
            plan: what to run.
            losses: local loss of each tower that has one in the plan.
            streams: where to run it.
            device: the model's device.
            reduction: of the plan's kind, over :func:`trained_blocks`; None: no reduction.
            dispatch: None: as the plan says.
            graphs: None: as the plan says.
            forwards: in place of the modules of those names (a tower's, ``over_arch``), such as compiled ones.
            parameter_streams: by block, for its parameters' gradients; None: as the plan says.
        """
        self.model = model
        self.plan = plan
        self.device = device
        self.blocks = trained_blocks(model, plan)
        self.reduction = reduction or NoReduction(self.blocks)
        self._losses = losses
        self._streams = streams
        self._dispatch = dispatch or make_dispatch(plan.dispatch, plan.workers, device)
        usual = Way(plan, graphs or make_graphs(plan, model, device))
        # Captured forwards have no autograd graph, which one backward through everything needs.
        self._ways = (usual, usual if plan.exact_every is None else Way(plan.exact(), NoGraphs()))
        self._way = usual
        self._parameter_streams = (
            _parameter_streams(plan, self.blocks, device) if parameter_streams is None else parameter_streams
        )
        forwards = forwards or {}
        self._towers = {tower.name: forwards.get(tower.name, model.tower(tower.name)) for tower in plan.towers}
        self._run_over_arch = forwards.get(OVER_ARCH, model.over_arch)
        self._states = TowerStates(tower.name for tower in plan.towers)
        self._run_op: dict[str, Handler] = {
            "lookup": self._lookup,
            "order": self._order,
            "enter": self._enter,
            "forward": self._forward,
            "logit_join": self._logit_join,
            "local_loss": self._local_loss,
            "early_backward": self._early_backward,
            "over_arch": self._over_arch,
            "join": _nothing,
            "backward": self._backward,
            "reduce": self._reduce,
            "leave": _nothing,
            "end": _nothing,
        }

    def dense_parameters(self) -> dict[str, nn.Parameter]:
        """Trained dense parameters by the names that :class:`Gradients` uses, towers first."""
        return {name: parameter for block in self.blocks.values() for name, parameter in block.items()}

    def run(
        self, batch: Batch, finish: Mapping[str, Handler], *, measure: bool = False, exact: bool = False
    ) -> StepState:
        """Runs the program; ``finish`` does what needs more than gradients (such as ``check``, ``update``).

        Args:
            batch: one row or more, on the model's device.
            finish: by operation kind; kinds that it leaves out only wait for what they come after.
            measure: time the operations, where the streams can.
            exact: as in a step in which nothing is cut.

        Raises:
            IllegalTransitionError: a tower is not where it should be.
            Exception: whatever an operation raised, here or on a worker, with a note that names it.
        """
        state = self.begin(batch, measure=measure, exact=exact)
        self.launch_before(state)
        self.launch_captured(state, finish)
        self.launch_after(state, finish)
        return state

    def begin(self, batch: Batch, *, measure: bool = False, exact: bool = False) -> StepState:
        """The start of a step, whose main stream is the current one. Its parts follow in their order."""
        self._way = self._ways[exact]
        self._streams.begin(measure=measure)
        return StepState.of(batch, min(self.plan.micro_batches, batch.size), exact=exact, measure=measure)

    def launch_before(self, state: StepState) -> None:
        """What comes before the part that a step graph holds, see :class:`erase_rec.schedule.program.Parts`."""
        self._launch(state, self._parts(state).before, self._run_op, self._dispatch)

    def launch_captured(self, state: StepState, finish: Mapping[str, Handler]) -> None:
        """The part that a step graph holds; reads of ``state`` what came before."""
        way, ops = self._way, self._parts(state).captured
        handlers = self._run_op | dict(finish)
        after_forward = next(position for position, op in enumerate(ops) if op.kind == "check")
        last = state.micros[-1]
        self._states.begin(len(state.micros))
        self.reduction.begin()
        # Captures are the main thread's.
        dispatch = BlockingDispatch() if way.graphs.begin(state.batch.size) else self._dispatch

        def forward() -> dict[str, Tensor]:
            self._launch(state, ops[:after_forward], handlers, dispatch)
            return {MAIN_LOSS: last.loss} | {name: last.weighted_losses[name] for name in way.late_losses}

        try:
            losses = self.reduction.forward(forward)
            last.loss = losses.pop(MAIN_LOSS)
            last.weighted_losses |= losses
            self._launch(state, ops[after_forward:], handlers, dispatch)
        except BaseException as error:
            others = self._dispatch.drain()
            # A worker's error is why the main thread may have found a tower failed.
            first = others.pop(0) if others and isinstance(error, IllegalTransitionError) else error
            for other in others:
                first.add_note(f"also: {type(other).__name__}: {other}")
            if first is not error:
                raise first from None
            raise

    def launch_after(self, state: StepState, finish: Mapping[str, Handler]) -> None:
        """What comes after it; reads of ``state`` the tables' gradient and what came before."""
        self._launch(state, self._parts(state).after, self._run_op | dict(finish), self._dispatch)

    def gradients(self, batch: Batch, *, exact: bool = False) -> Gradients:
        """Gradients of ``batch``, reduced, without any update; ready on the main stream. Its operations are timed."""

        def wait(state: StepState, op: Op) -> None:
            for block in self.updated_blocks(op):
                self.wait(block)

        state = self.run(batch, {"update": wait}, measure=True, exact=exact)
        found = {name: self.reduction.gradient(block, name) for block, held in self.blocks.items() for name in held}
        # Copies: a bucket and a captured tower write the next gradients where these are.
        parameters = {name: None if gradient is None else gradient.clone() for name, gradient in found.items()}
        pooled = self.pooled_gradient(state)
        return Gradients(parameters, None if pooled is None else pooled.clone())

    def pooled_gradient(self, state: StepState) -> Tensor | None:
        """Sum of the leaves' gradients in tower order, [B, E]; None when no leaf has one."""
        order = [tower.name for tower in self.plan.towers]
        parts = [
            [micro.leaf_gradients[name] for name in order if name in micro.leaf_gradients] for micro in state.micros
        ]
        present = [ordered_sum(found) for found in parts if found]
        assert len(present) in {0, len(parts)}
        return whole(present) if present else None

    def updated_blocks(self, op: Op) -> list[str]:
        """Blocks whose gradients the ``update`` operation ``op`` uses."""
        if op.tower is not None:
            return [op.tower]
        return [OVER_ARCH] if self.plan.optimizer == "per_tower" else [*self.blocks]

    def wait(self, block: str) -> None:
        """Lets the current stream (gloo: the host) wait for a block's reduced gradients."""
        self._join_parameters(block)
        self.reduction.wait(block)
        if block in self._towers and self.plan.reduction == "bucket":
            self._states.advance(block, Phase.REDUCED)

    def _join_parameters(self, block: str) -> None:
        if block in self._parameter_streams:
            self._parameter_streams[block].join()

    def finish(self, block: str) -> None:
        """Says that a block's parameters are updated."""
        if block in self._towers:
            self._states.advance(block, Phase.STEPPED)

    def _parts(self, state: StepState) -> Parts:
        return self._way.parts(len(state.micros))

    def _launch(self, state: StepState, ops: Sequence[Op], handlers: Mapping[str, Handler], dispatch: Dispatch) -> None:
        for op in ops:
            for key in op.joins:
                dispatch.join(key)
            handler = handlers.get(op.kind, _nothing)
            dispatch.launch(op, lambda op=op, handler=handler: self._run(state, op, handler))  # type: ignore[misc]

    def _run(self, state: StepState, op: Op, handler: Handler) -> None:
        try:
            with self._streams.run(op):
                handler(state, op)
        except Exception as error:
            if op.tower is not None:
                self._states.fail(op.tower)
                error.add_note(f"in {op.kind} of tower {op.tower}")
            raise

    def _lookup(self, state: StepState, op: Op) -> None:
        state.pooled = self.model.embeddings(state.batch.sparse)
        if self.plan.cuda_graph != "dense":
            self._enter(state, op)

    def _enter(self, state: StepState, op: Op) -> None:
        batch = state.batch
        state.tower_input = self._way.graphs.hold("pooled", state.pooled).detach()
        dense = self._way.graphs.hold("dense", batch.dense.to(state.pooled.dtype))
        label = self._way.graphs.hold("label", batch.label)
        for micro in state.micros:
            micro.dense, micro.label = dense[micro.rows], label[micro.rows]

    def _order(self, state: StepState, op: Op) -> None:
        state.order = self.model.embeddings.order(state.batch.sparse)

    def _forward(self, state: StepState, op: Op) -> None:
        micro, tower = state.micros[op.micro], self._tower(op)
        self._states.advance(tower.name, Phase.FORWARD, op.micro)
        leaf = state.tower_input[micro.rows]
        if tower.name in self._way.train_tables:
            leaf.requires_grad_()
        inputs = [self._way.graphs.hold(f"{op.key}:{name}", self._cut(micro.outputs, name)) for name in tower.inputs]

        def compute() -> tuple[Tensor, Tensor]:
            output, logit = self._towers[tower.name](micro.dense, leaf, inputs)
            return output, logit

        last = self._is_last(state, op)
        with beside(self._parameter_streams.get(tower.name)):
            output, logit = self._way.graphs.run(op, lambda: self.reduction.call(tower.name, compute, last=last))
        assert output is not None
        assert logit is not None
        micro.leaves[tower.name], micro.outputs[tower.name], micro.logits[tower.name] = leaf, output, logit

    def _logit_join(self, state: StepState, op: Op) -> None:
        micro = state.micros[op.micro]
        total = ordered_sum([logit.detach() for logit in micro.logits.values()])
        micro.logit_sum = self._way.graphs.hold(op.key, total)

    def _local_loss(self, state: StepState, op: Op) -> None:
        """The tower's loss; its graph ends at the tower's leaf, inputs and parameters."""
        micro, tower = state.micros[op.micro], self._tower(op)
        self._states.advance(tower.name, Phase.LOSS, op.micro)
        assert tower.loss is not None
        weight = micro.share * tower.loss.weight

        def compute() -> tuple[Tensor, Tensor]:
            loss = self._losses[tower.name](self._target_logit(micro, tower), micro.label)
            return loss, loss if weight == 1 else weight * loss

        loss, weighted = self._way.graphs.run(op, compute)
        assert loss is not None
        assert weighted is not None
        micro.local_losses[tower.name], micro.weighted_losses[tower.name] = loss, weighted

    def _target_logit(self, micro: MicroState, tower: TowerPlan) -> Tensor:
        assert tower.loss is not None
        logit = micro.logits[tower.name]
        if tower.loss.target == "own":
            return logit
        assert micro.logit_sum is not None
        joint: Tensor = _InPlaceOf.apply(logit, micro.logit_sum)  # type: ignore[no-untyped-call]
        return joint

    def _early_backward(self, state: StepState, op: Op) -> None:
        micro, tower = state.micros[op.micro], self._tower(op)
        self._states.advance(tower.name, Phase.BACKWARD, op.micro)
        leaf = micro.leaves[tower.name]
        names = [tower.name] if leaf.requires_grad else []

        def grad(loss: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
            return self._way.graphs.run(op, lambda: _grad(loss, inputs))

        leaves = [leaf] if names else []
        loss = micro.weighted_losses[tower.name]
        _keep(micro, names, self.reduction.differentiate(loss, leaves, [tower.name], grad=grad, last=False))
        self._states.advance(tower.name, Phase.GRADIENTS, op.micro)

    def _over_arch(self, state: StepState, op: Op) -> None:
        micro = state.micros[op.micro]
        outputs = [self._cut(micro.outputs, tower.name) for tower in self.plan.towers]
        logits = [self._cut(micro.logits, tower.name) for tower in self.plan.towers]

        def run() -> Tensor:
            logit: Tensor = self._run_over_arch(outputs, logits)
            return logit

        with beside(self._parameter_streams.get(OVER_ARCH)):
            micro.logit = self.reduction.call(OVER_ARCH, run, last=self._is_last(state, op))
        micro.loss = cross_entropy(micro.logit, micro.label)

    def _backward(self, state: StepState, op: Op) -> None:
        """Aggregate backward: the main loss and every local loss that was not launched early, in one call."""
        micro, last = state.micros[op.micro], self._is_last(state, op)
        rest = [tower for tower in self._way.plan.towers if not tower.early]
        trained = [tower.name for tower in rest if not tower.frozen]
        for name in trained:
            self._states.advance(name, Phase.BACKWARD, op.micro)
        main = micro.loss if micro.share == 1 else micro.share * micro.loss
        local = total_of([micro.weighted_losses[name] for name in self._way.late_losses])
        total = main if local is None else main + local
        leaves = [tower.name for tower in rest if micro.leaves[tower.name].requires_grad]
        chosen = {"both": total, "main": main, "local": local, "none": None}[self.plan.embedding_gradient]
        if leaves and chosen is not total:
            # The tables learn from fewer losses than the towers do: a pass of its own.
            assert chosen is not None
            inputs = [micro.leaves[name] for name in leaves]
            _keep(micro, leaves, torch.autograd.grad(chosen, inputs, retain_graph=True, allow_unused=True))
            leaves = []
        found = self.reduction.differentiate(
            total, [micro.leaves[name] for name in leaves], [OVER_ARCH, *trained], grad=_grad, last=last
        )
        _keep(micro, leaves, found)
        for name in trained:
            self._states.advance(name, Phase.GRADIENTS, op.micro)

    def _reduce(self, state: StepState, op: Op) -> None:
        if op.tower is not None:
            self._states.advance(op.tower, Phase.REDUCING)
        self._join_parameters(op.tower or OVER_ARCH)
        self.reduction.start(op.tower or OVER_ARCH)

    def _tower(self, op: Op) -> TowerPlan:
        assert op.tower is not None
        return self._way.towers[op.tower]

    def _cut(self, values: Mapping[str, Tensor], name: str) -> Tensor:
        return values[name].detach() if self._way.towers[name].detach else values[name]

    def _is_last(self, state: StepState, op: Op) -> bool:
        return op.micro == len(state.micros) - 1


class _InPlaceOf(torch.autograd.Function):
    """The value of ``total`` where ``part``, a term of it, stands: the gradient goes to ``part``, unchanged."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, part: Tensor, total: Tensor) -> Tensor:
        return total.view_as(total)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def trained_blocks(model: CTRModel, plan: Plan) -> dict[str, dict[str, nn.Parameter]]:
    """Parameters that are trained, by block (towers in order, then the over-arch) and checkpoint name.

    Raises:
        ValueError: two blocks share a parameter: its gradient would be taken and updated twice.
    """
    modules: dict[str, TowerBlock | OverArch] = {tower.name: model.tower(tower.name) for tower in plan.towers}
    prefixes = {name: f"towers.{name}" for name in modules} | {OVER_ARCH: OVER_ARCH}
    modules[OVER_ARCH] = model.over_arch
    owner: dict[int, str] = {}
    blocks: dict[str, dict[str, nn.Parameter]] = {}
    for block, module in modules.items():
        named = {
            name: value for name, value in named_parameters(module, prefixes[block]).items() if value.requires_grad
        }
        for name, parameter in named.items():
            if (other := owner.setdefault(id(parameter), block)) != block:
                raise ValueError(f"{block} and {other} share the parameter {name}; make them one block")
        if named:
            blocks[block] = named
    return blocks


def named_parameters(module: TowerBlock | OverArch, prefix: str) -> dict[str, nn.Parameter]:
    """Parameters of a tower block or over-arch by ``prefix.<name>``."""
    assert isinstance(module, nn.Module)
    return {f"{prefix}.{name}": parameter for name, parameter in module.named_parameters()}


def _parameter_streams(plan: Plan, blocks: Iterable[str], device: torch.device) -> dict[str, ParameterStream]:
    """A stream a block where the plan runs its parameters' gradients beside the rest."""
    if device.type != "cuda" or not plan.parameters_beside:
        return {}
    return {block: CudaParameterStream(device) for block in blocks}


def _nothing(state: StepState, op: Op) -> None:
    pass


def _grad(loss: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    found: Sequence[Tensor | None] = torch.autograd.grad(
        loss, inputs, grad_outputs=unit_gradient(loss), allow_unused=True
    )
    return found


def _keep(micro: MicroState, leaves: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
    for name, gradient in zip(leaves, gradients, strict=True):
        if gradient is not None:
            micro.leaf_gradients[name] = gradient
