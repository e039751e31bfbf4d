"""The documentation's page on combinations, written from the rules' own data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

from erase_rec.config.feature_defaults import IDLE_DEFAULTS
from erase_rec.config.legality import REDUCTION_TABLE, RULES, Launch, Reduction
from erase_rec.config.presets import PRESETS
from erase_rec.config.relevance import RELEVANCE, SPARSE_FEATURES, yaml_word


def rules_as_markdown() -> str:
    """The whole page."""
    return "\n".join(
        (
            "# Combinations of settings",
            "",
            "All problems of a configuration are reported at once, before data is read. Written by",
            "`python -m erase_rec.config.rules_page` from the rules that the loader applies.",
            "",
            "## Refused",
            "",
            *_table(
                ("combination", "why", "way out"),
                ((rule.refused, rule.reason, rule.way_out) for rule in (*RULES, IDLE_DEFAULTS)),
            ),
            "",
            "## Read in some settings only",
            "",
            *_table(("key", "read with"), _relevance_rows()),
            "",
            "## Presets",
            "",
            "A preset fills what the configuration leaves open.",
            "",
            *_table(("key", *PRESETS), _preset_rows()),
            "",
            "## Launching backward passes and reducing gradients",
            "",
            "FUP is `distributed.find_unused_parameters`; left out, it is false.",
            "",
            reductions_as_markdown(),
            "",
        )
    )


def reductions_as_markdown() -> str:
    """The table of launches and reductions."""
    return "\n".join(_table(("", *get_args(Reduction)), _reduction_rows()))


def _table(header: Sequence[str], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _relevance_rows() -> Iterator[tuple[str, ...]]:
    for row in RELEVANCE:
        section = ".".join(map(str, row.section)) + ("[]" if row.section == SPARSE_FEATURES else "")
        yield f"`{section}.{row.key}`", f"`{row.selector}`: {', '.join(map(yaml_word, row.values))}"


def _preset_rows() -> Iterator[tuple[str, ...]]:
    for key in ("detach", "stream"):
        yield f"`towers[].{key}`", *(yaml_word(getattr(preset, key)) for preset in PRESETS.values())
    for section in ("schedule", "distributed"):
        keys = dict.fromkeys(key for preset in PRESETS.values() for key in getattr(preset, section))
        for key in keys:
            yield f"`{section}.{key}`", *(yaml_word(preset.value(section, key)) for preset in PRESETS.values())


def _reduction_rows() -> Iterator[tuple[str, ...]]:
    for launch in get_args(Launch):
        cells = [REDUCTION_TABLE[launch, reduction] for reduction in get_args(Reduction)]
        yield launch, *("; ".join(filter(None, ("ok" if c.legal else "refused", c.note, c.way_out))) for c in cells)


if __name__ == "__main__":
    print(rules_as_markdown(), end="")
