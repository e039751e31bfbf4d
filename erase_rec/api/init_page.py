"""The text of a first configuration, from a look at the rows; every choice is explained in a comment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from data.features.cells import one_array
from data.sources.source import Source, positions_of
from erase_rec.api.init_choice import Choice, Pace, choose, embedding_dim, with_a_category
from erase_rec.api.init_facts import Sample, facts_of, sample
from erase_rec.api.init_label import LabelChoice, choose_label
from erase_rec.errors import UserError

EVAL_FRACTION = 0.1
STREAM_BYTES = 4 << 30
"""Plain files from this size on are read anew in each epoch instead of kept in memory."""


@dataclass(frozen=True)
class Input:
    """Rows that a configuration is to be written for.

    Attributes:
        name: for people.
        kind: ``data.kind``.
        source: the rows.
        paths: ``data.train``; empty for rows that are in memory.
        params: ``data.params``.
        hint: what may be wrong where the label's column is not there.
    """

    name: str
    kind: str
    source: Source
    paths: Sequence[str] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    hint: str = ""


def configuration(found: Input, label: str, positive: Sequence[str], at_least: float | None) -> tuple[str, list[str]]:
    """The YAML text, and what was found in a few lines.

    Args:
        found: the rows.
        label: the column that says whether there was a click.
        positive: labels that mean a click; none: they are told by the values.
        at_least: a click is a label of at least this.

    Raises:
        UserError: the rows cannot be read, or the label or its rule does not fit them.
    """
    positions_of([label], found.source.columns(), found.name, found.hint)
    rows = sample(found.source)
    if not rows.num_rows:
        reason = rows.bad[0].reason if rows.bad else "there are none"
        raise UserError(f"{found.name}: no row can be read: {reason}")
    if rows.bad and len(rows.bad) > 0.01 * (rows.num_rows + len(rows.bad)):
        first = rows.bad[0]
        raise UserError(
            f"{found.name}: {len(rows.bad):,} of the first {rows.num_rows + len(rows.bad):,} rows cannot be read; "
            f"{first.unit} {first.number}: {first.reason}"
        )
    how = choose_label(label, one_array(rows.columns[label]), positive, at_least)
    facts = list(facts_of(rows.columns, how.values, without=[label]))
    choices = with_a_category([choose(each, rows.total_rows) for each in facts], facts)
    counts = {role: sum(choice.role == role for choice in choices) for role in ("dense", "sparse", "out")}
    about = "" if rows.whole else f" (the first {rows.num_rows:,} were looked at)"
    summary = [
        f"{rows.total_rows:,} rows{about}; label {label!r}: {how.why}",
        f"{counts['dense']} dense and {counts['sparse']} sparse features, {counts['out']} columns left out",
    ]
    return _page(found, label, how, rows, choices), summary


def _page(found: Input, label: str, how: LabelChoice, rows: Sample, choices: Sequence[Choice]) -> str:
    kept = [choice for choice in choices if choice.role != "out"]
    dim, why_dim = embedding_dim(kept)
    num_train = max(1, int(rows.total_rows * (1 - EVAL_FRACTION)))
    pace = Pace.of(num_train)
    looked = "all" if rows.whole else f"the first {rows.num_rows:,} of about"
    lines = [
        "# Written by erase-rec init, from a look at",
        f"# {_comment(found.name)}: {looked} {rows.total_rows:,} rows.",
        "# Check one thing that no program can see: every feature must be known before the click is.",
        "",
        "seed: 1",
        "",
        "data:",
        f"  kind: {found.kind}",
        *([f"  train: {_flow(list(found.paths))}"] if found.paths else []),
        f"  eval_fraction: {EVAL_FRACTION}  # rows held out at random; by user or by time: data.split",
        f"  label: {_flow({'column': label, **how.rule})}  # {_comment(how.why)}",
    ]
    if found.params:
        lines.append(f"  params: {_flow(dict(found.params))}")
    if rows.bad:
        first = rows.bad[0]
        lines.append(
            f"  bad_rows: skip  # {len(rows.bad):,} rows cannot be read; {first.unit} {first.number}: "
            f"{_comment(first.reason)}"
        )
    if found.paths and found.source.num_bytes() >= STREAM_BYTES:
        lines.append("  reading: stream  # too large to keep; faster: erase-rec prepare, then data.prepared")
    lines += ["", "features:", *_features("dense", choices), *_features("sparse", choices)]
    lines += _left_out(choices, rows.repeated)
    lines += ["", f"embedding: {{dim: {dim}}}  # {why_dim}", "", *_towers(kept)]
    lines += [
        "",
        "schedule: {preset: erase}  # each tower's backward starts early; exact: one model, trained end to end",
        "",
        "optimizer:",
        "  dense: {kind: adam, lr: 1e-3}",
        "  sparse: {kind: rowwise_adagrad, lr: 2e-2}",
        f"  lr_schedule: {{kind: linear, warmup_steps: {pace.warmup_steps}, min_factor: 0.05}}",
        "",
        "train:",
        f"  epochs: {pace.epochs}  # of {num_train:,} training rows",
        f"  local_batch_size: {pace.batch_size}  # {math.ceil(num_train / pace.batch_size):,} steps an epoch",
        f"  log_every_steps: {pace.log_every_steps}",
        "",
        "eval: {local_batch_size: 4096}",
        "",
    ]
    return "\n".join(lines)


def _features(role: str, choices: Sequence[Choice]) -> list[str]:
    chosen = [choice for choice in choices if choice.role == role]
    if not chosen:
        return [f"  {role}: []"]
    taken = {choice.column for choice in choices}
    lines = [f"  {role}:"]
    for choice in chosen:
        name = {"name": choice.column} if choice.column else {"name": _free_name(taken), "column": ""}
        lines.append(f"    - {_flow({**name, **choice.settings})}  # {_comment(choice.why)}")
    return lines


def _free_name(taken: set[str]) -> str:
    name = "unnamed"
    while name in taken:
        name += "_"
    return name


def _left_out(choices: Sequence[Choice], repeated: Sequence[str]) -> list[str]:
    out = [
        f"  #   {_comment(choice.column or '(nameless)')}: {_comment(choice.why)}"
        for choice in choices
        if choice.role == "out"
    ]
    out += [f"  #   {_comment(name)}: several columns have this name; rename them to use them" for name in repeated]
    return ["  # Left out:", *out] if out else []


def _towers(kept: Sequence[Choice]) -> list[str]:
    """Towers that can read what there is."""
    num_sparse = sum(choice.role == "sparse" for choice in kept)
    has_dense = num_sparse < len(kept)
    lines = [
        "# Each tower is trained by a loss of its own on the click alone; the over-arch joins their outputs.",
        "towers:",
    ]
    if has_dense:
        lines.append(_tower("dense_mlp", "mlp", {"hidden": [64, 32]}, {"inputs": {"sparse": False}}))
    if num_sparse + has_dense >= 2:
        bottom = {"bottom_hidden": [32]} if has_dense else {}
        lines.append(_tower("interaction", "dot_interaction", {**bottom, "hidden": [64]}))
    lines.append(_tower("cross", "dcn_v2", {"num_layers": 2, "rank": 32}))
    lines.append(_tower("deep", "mlp", {"hidden": [128, 64]}))
    return [*lines, "", "over_arch: {hidden: [64, 32], logits: additive}"]


def _tower(name: str, kind: str, params: dict[str, Any], more: dict[str, Any] | None = None) -> str:
    loss = {"kind": "bce", "weight": 1.0, "target": "joint"}
    entry = {"name": name, "kind": kind, **(more or {}), "loss": loss, "params": {**params, "out_dim": 32}}
    return f"  - {_flow(entry)}"


def _flow(value: dict[str, Any] | list[str]) -> str:
    """A mapping or a list in one line of YAML."""
    printable = repr(value).isprintable()
    dumped: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**9, allow_unicode=printable)
    return dumped.strip()


def _comment(text: str) -> str:
    """Text that stays in one line of a comment."""
    return "".join(character if character.isprintable() else " " for character in text)
