"""The sweep that tells what cutting towers costs in NE, as a command that can be pasted into a shell."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence

from erase_rec.advice.candidates import parsed
from erase_rec.bench.arms import Arm
from erase_rec.sweep.points import Override, layered

SEEDS = (1, 2, 3, 4, 5)
"""An interval over fewer pairs is wide."""
SWEEP_FILE = "ne_of_cut_towers.yaml"
_PLAIN = re.compile(r"[\w./][\w./+-]*")
"""Texts that YAML needs no quotes for; a sweep's file reads every value as text."""
_SET_BY_SWEEPS = ("seed", "run")


def sweep_text(config: str, overrides: Sequence[str], exact: Arm, cut: Arm) -> str:
    """A sweep's file: both ways with several seeds, scored for the comparison.

    Args:
        config: name or path, as on the command line.
        overrides: of the command line.
        exact: keeps every gradient.
        cut: cuts towers.
    """
    own = [each for each in parsed(overrides) if each.key.partition(".")[0] not in _SET_BY_SWEEPS]
    lines = [f"base: {_text(config)}", "overrides:"]
    lines += _section(layered(own, parsed(["eval.scores=true"])), indent=2)
    lines.append("arms:")
    for name, arm in (("exact", exact), ("cut", cut)):
        lines += [f"  {name}:", *_section(parsed(arm.overrides), indent=4)]
    lines.append(f"seeds: {list(SEEDS)}")
    return "\n".join(lines) + "\n"


def sweep_commands(config: str, overrides: Sequence[str], exact: Arm, cut: Arm) -> str:
    """Writes the file, runs the sweep, and asks again with its runs."""
    text = sweep_text(config, overrides, exact, cut)
    folder = f"runs/{SWEEP_FILE.removesuffix('.yaml')}"
    again = shlex.join(["erase-rec", "advise", "--config", config, *overrides, "--runs", folder])
    write = f"cat > {SWEEP_FILE} <<'END'\n{text}END"
    return f"{write}\nerase-rec sweep --config {SWEEP_FILE} --out {folder}\n{again}"


def _section(overrides: Iterable[Override], *, indent: int) -> list[str]:
    """Lines of YAML that mean the same as these texts."""
    return [f"{' ' * indent}{_text(each.key)}: {_yaml(each.value.strip())}" for each in overrides]


def _yaml(value: str) -> str:
    """A section, list, quoted text or null is YAML as it is; everything else is plain text to an override."""
    if value in {"", "~", "null"}:
        return "null"
    return value if value[0] in "[{\"'" else _text(value)


def _text(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
