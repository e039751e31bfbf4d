"""What part each tower has in the model's logit: planted shares, doubles and dead towers are found, others are not."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from schedule_cases import make_batch, make_config, make_model, tower
from torch import Tensor

from erase_rec.batch import Batch
from erase_rec.distributed.world import World
from erase_rec.health import tower_warnings
from erase_rec.protocols import EvalResult
from eval.evaluator import PooledEvaluator
from eval.metrics import ClickSums, click_sums
from eval.registry import SUM_METRICS
from eval.tower_health import tower_health

ROWS = 400
TOWERS = ("deep", "dot", "cross")


def planted() -> tuple[Tensor, Tensor]:
    """Three unlike logits, and labels that they explain."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, ROWS, generator=generator, dtype=torch.float64)
    return logits, (torch.rand(ROWS, generator=generator) < logits.sum(dim=0).sigmoid()).float()


def result_of(**towers: dict[str, float]) -> EvalResult:
    known = {name: {"ne": 0.9, "auc": 0.6} | found for name, found in towers.items()}
    return EvalResult(0.8, 0.7, 0.5, 1.0, 0.3, ROWS, towers=known)


def test_shares_are_of_the_absolute_terms_with_the_over_archs_own_as_the_rest() -> None:
    terms, label = planted()
    rest = torch.full((ROWS,), 2.0).double()
    health, _ = tower_health(terms.sum(dim=0) + rest, terms, label, terms=terms)
    sizes = [sum(abs(value) for value in row.tolist()) for row in terms]
    total = sum(sizes) + 2.0 * ROWS
    assert [found["share"] for found in health] == pytest.approx([size / total for size in sizes])


def test_ne_without_a_tower_is_that_of_the_logit_without_it() -> None:
    terms, label = planted()
    logit = terms.sum(dim=0)
    health, _ = tower_health(logit, terms, label, without=logit - terms)
    ne = SUM_METRICS["ne"](ClickSums(*click_sums(logit, label).tolist()))
    for found, term in zip(health, terms, strict=True):
        assert found["ne_without"] == SUM_METRICS["ne"](ClickSums(*click_sums(logit - term, label).tolist()))
        assert found["ne_without"] > ne, "each explains some of the labels"


def test_the_most_alike_tower_and_its_correlation() -> None:
    logits, label = planted()
    logits[2] = 1 - 3 * logits[0] + 0.01 * logits[1]
    health, most_like = tower_health(logits.sum(dim=0), logits, label)
    assert most_like[0] == 2
    assert most_like[2] == 0
    assert health[0]["correlation"] == pytest.approx(abs(torch.corrcoef(logits)[0, 2].item()))
    assert 0 <= health[1]["correlation"] < 0.2


@pytest.mark.parametrize("rows", [0, 1])
def test_too_few_rows_say_nothing_of_likeness(rows: int) -> None:
    logits, label = planted()
    health, most_like = tower_health(logits[0, :rows], logits[:, :rows], label[:rows])
    assert health == [{}, {}, {}]
    assert most_like == [None, None, None]


def test_a_constant_logit_is_like_no_other() -> None:
    logits, label = planted()
    logits[1] = 0.5
    health, most_like = tower_health(logits.sum(dim=0), logits, label)
    assert "correlation" not in health[1]
    assert most_like == [2, None, 0]


def batches(size: int) -> Iterator[Batch]:
    for start in range(0, ROWS, size):
        batch = make_batch(start, min(size, ROWS - start))
        yield Batch(batch.dense, batch.sparse, batch.label, batch.row_ids + start)


@pytest.mark.parametrize("logits", ["none", "inputs", "additive", "gated"])
def test_every_over_arch_form_says_a_towers_part(logits: str) -> None:
    """The share where logits are added; else, and where asked, the NE without."""
    model = make_model(make_config([tower(name) for name in TOWERS], over_arch={"logits": logits}))
    model.train(False)
    adds, evaluator = logits in {"additive", "gated"}, PooledEvaluator(TOWERS, World())
    for ablate in (False, True):
        result = evaluator.evaluate(lambda batch, a=ablate: model.score(batch, terms=True, ablate=a), batches(64))
        for name in TOWERS:
            assert ("share" in result.towers[name]) == adds
            assert ("ne_without" in result.towers[name]) == (ablate or not adds)
            assert result.most_like[name] in TOWERS
    other = evaluator.evaluate(lambda batch: model.score(batch, terms=True, ablate=True), [*batches(64)])
    assert other == result
    assert "share" not in evaluator.evaluate(model.score, batches(64)).towers["deep"]


@pytest.mark.parametrize("logits", ["none", "gated"])
def test_the_model_without_a_tower_reads_zeros_from_it(logits: str) -> None:
    model, batch = make_model(make_config([tower(name) for name in TOWERS], over_arch={"logits": logits})), make_batch()
    found = model.score(batch, ablate=True)
    pooled = model.embeddings(batch.sparse)
    outputs, local = zip(*(model.tower(name)(batch.dense, pooled) for name in TOWERS), strict=True)
    for position, name in enumerate(TOWERS):
        kept = [float(at != position) for at in range(3)]
        expected = model.over_arch(
            [keep * output for keep, output in zip(kept, outputs, strict=True)],
            [keep * logit for keep, logit in zip(kept, local, strict=True)],
        )
        torch.testing.assert_close(found.without[name], expected, rtol=1e-12, atol=1e-12)


def test_dead_towers_are_named_with_the_number_and_the_way_out() -> None:
    (share,) = tower_warnings(result_of(deep={"share": 0.0002}, dot={"share": 0.3}))
    assert share.startswith("tower deep is 0.02 % of the final logit")
    assert "take it out" in share
    (missed,) = tower_warnings(result_of(deep={"ne_without": 0.800001}, dot={"ne_without": 0.81}))
    assert missed.startswith("tower deep is not missed: NE is 0.80000 with it and 0.80000 without it")


def test_doubles_are_said_once() -> None:
    pair = {"correlation": 0.9995}
    result = result_of(deep=pair, dot=pair, cross={"correlation": 0.99})
    likes = {"deep": "dot", "dot": "deep", "cross": "deep"}
    found = EvalResult(**{**vars(result), "most_like": likes})
    (sentence,) = tower_warnings(found)
    assert sentence.startswith("towers deep and dot say the same: the correlation of their logits is 0.99950")


def test_what_is_not_known_is_no_sign() -> None:
    assert tower_warnings(result_of(deep={}, dot={"share": math.nan, "ne_without": math.nan})) == []
