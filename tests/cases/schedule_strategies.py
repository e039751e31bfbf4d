"""Random configurations of schedules, legal and illegal."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from schedule_cases import NAMES, make_config, tower

from erase_rec.config.schema import Config

MAX_TOWERS = 5
HEADS: list[dict[str, Any]] = [{}, {}, {}, {"kind": "goodness", "params": {"threshold": 0.5}}]
REDUCTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "bucket", "bucket_mib": 1e-4},
    {"reduction": "ddp_per_tower"},
    {"reduction": "ddp", "find_unused_parameters": False},
    {"reduction": "ddp", "find_unused_parameters": True},
]


@st.composite
def towers(draw: st.DrawFn, *, consistent: bool) -> list[dict[str, Any]]:
    """Sections of one to five towers; ``consistent``: each trained by something, and only by what it may be."""
    sections: list[dict[str, Any]] = []
    for name in NAMES[: draw(st.integers(1, MAX_TOWERS))]:
        detach, frozen = draw(st.booleans()), draw(st.integers(0, 4)) == 0
        loss = draw(st.sampled_from([None, 0, 0.5, 1.0, 2.0]))
        readable = [section["name"] for section in sections]
        if consistent:
            loss = None if frozen else (loss or 1.0) if detach else loss
            if detach and not frozen:
                readable = [section["name"] for section in sections if section["detach"]]
        reads = draw(st.lists(st.sampled_from(readable), unique=True, max_size=2)) if readable else []
        stream = draw(st.sampled_from(["own", "own", "main", "first", "second"]))
        target = draw(st.sampled_from(["own", "joint"]))
        head = draw(st.sampled_from(HEADS))
        sections.append(
            tower(
                name,
                *reads,
                loss=loss,
                target=target,
                detach=detach,
                frozen=frozen,
                stream=stream,
                head=head,
            )
        )
    read = {name for section in sections for name in section["inputs"]["towers"]}
    for section in sections:
        can = section["detach"] and not section["frozen"] and section["name"] not in read
        if (can or not consistent) and draw(st.integers(0, 3)) == 0:
            section["cut_at"] = 1
    return sections


@st.composite
def configurations(draw: st.DrawFn, *, consistent: bool = False) -> Config:
    """Towers, schedule, reduction, clipping and micro-batches; ``consistent``: mostly, but not always, legal."""
    early = draw(st.integers(0, 4)) > 0
    dispatch = draw(st.sampled_from(["blocking", "non_blocking"])) if early or not consistent else "blocking"
    workers = draw(st.integers(1, 3)) if dispatch == "non_blocking" or not consistent else 1
    optimizer = draw(st.sampled_from(["end", "per_tower"]))
    clips = [{}, {}, {"max_grad_norm": 0.1, "clip": "per_tower"}]
    clips += [{"max_grad_norm": 0.1}] if optimizer == "end" or not consistent else []
    clips += [] if consistent else [{"clip": "per_tower"}]
    modes = ["both", "both", "local", "main", "none"]
    graphs = [None, None, "dense"] if dispatch == "blocking" or not consistent else [None]
    return make_config(
        draw(towers(consistent=consistent)),
        over_arch={"hidden": (8,), "logits": draw(st.sampled_from(["none", "inputs", "additive", "gated"]))},
        schedule={
            "early_backward": early,
            "dispatch": dispatch,
            "workers": workers,
            "cuda_graph": draw(st.sampled_from(graphs)),
            "optimizer": optimizer,
            "embedding_gradient": draw(st.sampled_from(modes)),
        },
        distributed=draw(st.sampled_from(REDUCTIONS)),
        optimizer={"dense": {"kind": "sgd", "lr": 0.1} | draw(st.sampled_from(clips))},
        train={"steps": 1, "micro_batches": draw(st.integers(1, 3))},
    )
