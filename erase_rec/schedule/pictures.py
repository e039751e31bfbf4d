"""What docs/schedules.md draws: small configurations and the order of work that their programs guarantee.

    python -m erase_rec.schedule.pictures docs/schedules.md

writes every generated part of the page again, each between ``<!-- generated: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from erase_rec.config.presets import apply_preset
from erase_rec.config.rules_page import reductions_as_markdown
from erase_rec.config.schema import Config
from erase_rec.schedule.plan import MAIN, Plan
from erase_rec.schedule.program import Op, guaranteed_order, parts, program

_EXACT = """\
towers:
  - {name: deep, kind: mlp}
  - {name: cross, kind: dcn_v2}
"""
_OWN = """\
towers:
  - {name: deep, kind: mlp, loss: {target: own}}
  - {name: cross, kind: dcn_v2, loss: {target: own}}
"""
_JOINT = _OWN.replace("own", "joint")
_EARLY = "preset: erase, cuda_graph: none"

PICTURES: Mapping[str, str] = {
    "exact": f"{_EXACT}schedule: {{preset: exact}}",
    "exact_streams": f"{_EXACT}schedule: {{preset: exact_streams}}",
    "detached": f"{_OWN}schedule: {{preset: detached}}",
    "blocking_own": f"{_OWN}schedule: {{{_EARLY}}}",
    "blocking_joint": f"{_JOINT}schedule: {{{_EARLY}}}",
    "non_blocking": f"{_OWN}schedule: {{{_EARLY}, dispatch: non_blocking}}",
    "per_tower": f"{_OWN}schedule: {{{_EARLY}, optimizer: per_tower}}",
    "bucket": f"{_OWN}schedule: {{{_EARLY}, optimizer: per_tower}}\ndistributed: {{reduction: bucket}}",
    "bucket_non_blocking": f"{_OWN}schedule: {{{_EARLY}, dispatch: non_blocking}}\ndistributed: {{reduction: bucket}}",
    "ddp": f"{_OWN}schedule: {{preset: paper_row2}}",
    "ddp_per_tower": f"{_OWN}schedule: {{{_EARLY}, optimizer: per_tower}}\ndistributed: {{reduction: ddp_per_tower}}",
    "chain": f"""\
towers:
  - {{name: block1, kind: mlp, loss: {{target: own}}}}
  - {{name: block2, kind: mlp, loss: {{target: own}}, inputs: {{towers: [block1]}}}}
  - {{name: block3, kind: mlp, loss: {{target: own}}, inputs: {{towers: [block2]}}}}
schedule: {{{_EARLY}}}""",
    "tower_graphs": f"{_OWN}schedule: {{preset: paper_row1}}",
    "dense_graph": f"{_OWN}schedule: {{preset: erase, cuda_graph: dense}}",
    "micro_batches": (
        "towers:\n  - {name: deep, kind: mlp, loss: {target: own}}\n"
        f"schedule: {{{_EARLY}}}\ntrain: {{steps: 1, micro_batches: 2}}"
    ),
}
"""Settings by picture, in YAML, as far as the order of work depends on them."""

_REST: Mapping[str, Any] = {"data": {"kind": "synthetic"}, "features": {"dense": ["x"]}, "train": {"steps": 1}}
_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def picture_plan(name: str) -> Plan:
    """The plan of a picture's settings, in one process."""
    config, _ = apply_preset(Config.model_validate(_REST | yaml.safe_load(PICTURES[name])))
    return Plan.from_config(config)


def picture_edges(ops: Sequence[Op]) -> Iterator[tuple[Op, Op]]:
    """The fewest pairs (first, then) from which every guaranteed order follows."""
    before = guaranteed_order(ops)
    for op in ops:
        indirect = frozenset[str]().union(*(before[key] for key in before[op.key]))
        yield from ((first, op) for first in ops if first.key in before[op.key] - indirect)


def is_captured(plan: Plan, op: Op) -> bool:
    """Whether ``op`` is replayed from a CUDA graph that holds a part of the step."""
    if plan.cuda_graph == "dense":
        return op in parts(program(plan)).captured
    in_tower = op.tower is not None and plan.tower(op.tower).early
    return plan.cuda_graph == "tower" and in_tower and op.kind in {"forward", "local_loss", "early_backward"}


def with_parts(page: str) -> str:
    """The page with every generated part as the code has it now."""
    return _PART.sub(lambda found: f"{found[1]}{_part(found[2])}\n{found[3]}", page)


def _part(name: str) -> str:
    if name == "reductions":
        return reductions_as_markdown()
    return f"```yaml\n{PICTURES[name]}\n```\n\n```mermaid\n{_mermaid(picture_plan(name))}\n```"


def _mermaid(plan: Plan) -> str:
    """Operations by stream, numbered in order of launch; dotted arrows are events that another stream waits for."""
    ops = program(plan)
    node = {op.key: f"n{number}" for number, op in enumerate(ops, start=1)}
    lines = ["flowchart TB"]
    for number, stream in enumerate((MAIN, *plan.streams())):
        lines.append(f'  subgraph s{number} ["stream {stream}"]')
        lines += [f"    {node[op.key]}{_label(plan, op, node[op.key][1:])}" for op in ops if op.stream == stream]
        lines.append("  end")
    for first, then in picture_edges(ops):
        arrow = "-->" if first.stream == then.stream else "-.->"
        lines.append(f"  {node[first.key]} {arrow} {node[then.key]}")
    return "\n".join(lines)


def _label(plan: Plan, op: Op, number: str) -> str:
    """Rectangular where the main thread launches the operation, round where a worker does."""
    notes = [f"{number} {op.key}"]
    if op.worker:
        notes.append(f"by worker {op.worker}")
    if op.joins:
        notes.append("once the worker has launched")
    if is_captured(plan, op):
        notes.append("captured")
    text = f'"{"<br/>".join(notes)}"'
    return f"([{text}])" if op.worker else f"[{text}]"


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(with_parts(document.read_text(encoding="utf-8")), encoding="utf-8")
