"""``erase-rec plan`` as a user types it; TorchRec's planner is asked for few tables, which takes seconds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from in_process import call

from erase_rec.config.presets import apply_preset
from erase_rec.config.schema import Config
from models.embeddings.equal_shards import make_enumerator
from models.embeddings.exchanged import collection_of
from models.embeddings.layout import Table
from models.embeddings.sharding_plan import DATA_PARALLEL, SPREAD, key_of, make_sharder, place_tables

SMALL = ("--config", "ctr_erase.yaml")


def sized(*rows: int) -> str:
    entries = [f"{{name: C{at + 1}, num_embeddings: {count}}}" for at, count in enumerate(rows)]
    return f"features.sparse=[{', '.join(entries)}]"


HASHED = "features.sparse_defaults={encoding: hash, min_count: null}"


def test_a_trillion_parameters_are_planned_without_memory_for_them(tmp_path: Path) -> None:
    ended = call(
        tmp_path, "plan", "--config", "ctr_erase.yaml", "--world-size", "64", "--out", "plan.json",
        "--rows-per-day", "10_000_000_000",
        HASHED, sized(2_000_000_000, 2_000_000_000, 1000), "embedding={sharding: auto, dim: 256}",
    )  # fmt: skip
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["parameters"]["tables"] == (4_000_000_004 + 1002) * 256 > 10**12
    kinds = [found["tables"][name]["sharding"] for name in ("C1", "C2", "C3")]
    assert kinds[:2] == ["row_wise", "row_wise"], "no rank holds a table of 2 TB"
    assert max(rank["tables"] for rank in found["memory_bytes"]) < 139 * 2**30
    ids = sum(place["rows"][1] - place["rows"][0] for place in found["tables"]["C1"]["places"])
    assert ids == 2_000_000_002
    assert found["problem"] is None
    assert found["step"]["ms"] == pytest.approx(sum(found["step"]["terms_ms"].values()))
    assert found["hours_a_day"] == pytest.approx(1e10 / found["rows_per_s"] / 3600)
    for words in ("1,024,000,257,536 parameters", "row_wise", "tables.exchange", "it keeps up", "first limit"):
        assert words in ended.stdout


def test_too_few_ranks_are_refused_with_the_number_that_is_enough(tmp_path: Path) -> None:
    """200 GB of tables on 8 GPUs of 16 GiB, of which 4 are kept and 15 % of the rest."""
    asked = ("plan", "--config", "ctr_erase.yaml", "--hbm-gib", "16", HASHED, sized(400_000_000, 400_000_000))
    spread = "embedding={sharding: row_wise, dim: 64}"
    ended = call(tmp_path, *asked, "--world-size", "8", spread, expect=2)
    assert "each of 8 ranks would hold 23.8 GiB of table weights and has room for" in ended.stderr
    assert "GiB too much; --world-size 24 is enough" in ended.stderr
    call(tmp_path, *asked, "--world-size", "24", spread)
    ended = call(tmp_path, *asked, "--world-size", "8", "embedding={sharding: replicated, dim: 64}", expect=2)
    assert "GPU memory: rank 0 needs" in ended.stderr
    assert "replicated tables do not shrink with more ranks: use embedding.sharding=auto" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--world-size", "8", "--nodes", "3"), "3 nodes cannot have as many of 8 ranks each"),
        (("--world-size", "8"), "'C1', 'C2' will have depends on data"),
        (("--world-size", "8", "--out", "plan.txt"), "write --out plan.json"),
        (("--world-size", "8", "--latency-us", "inf"), "--latency-us: found inf, expected a finite number"),
        (("--world-size", "8", "--hbm-gib", "2"), "--reserve-gib: 4 GiB leave nothing of a GPU's 2 (--hbm-gib)"),
        (("--world-size", "100_000_000"), "less than or equal to 4096"),
    ],
)
def test_what_cannot_be_planned_is_said(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    open_ended = "features.sparse_defaults={encoding: vocabulary, num_embeddings: null}"
    assert words in call(tmp_path, "plan", *SMALL, "features.sparse=[C1, C2]", open_ended, *arguments, expect=2).stderr


def test_speed_that_does_not_keep_up_is_a_limit(tmp_path: Path) -> None:
    asked = ("plan", *SMALL, HASHED, sized(1000, 1000), "--nodes", "1", "--world-size", "1", "--rows-per-day")
    ended = call(tmp_path, *asked, "1_000_000_000_000", expect=2)
    assert "rows/s are expected and 11,574,074 come" in ended.stderr
    assert re.search(r"hours; --world-size [2-8] is enough$", ended.stderr)
    assert "it keeps up" in call(tmp_path, *asked, "1_000_000_000").stdout


def test_shards_of_one_size_are_estimated_as_torchrec_estimates_each() -> None:
    from torchrec.distributed.planner import ParameterConstraints, Topology
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

    tables = [Table("a", 1003, 64, False), Table("b", 10, 128, False)]
    keys = [key_of(at) for at in range(len(tables))]
    collection = collection_of(tables, keys, weighted=False)
    topology = Topology(world_size=8, compute_device="cuda", local_world_size=4)
    types = ParameterConstraints(sharding_types=[DATA_PARALLEL, *SPREAD], compute_kernels=["dense", "fused"])
    constraints = dict.fromkeys(keys, types)
    theirs = EmbeddingEnumerator(topology=topology, batch_size=64, constraints=constraints)
    found = make_enumerator(topology, 64, constraints).enumerate(collection, [make_sharder({})])
    expected = theirs.enumerate(collection, [make_sharder({})])
    assert {option.sharding_type for option in expected} == {DATA_PARALLEL, *SPREAD}
    for mine, other in zip(found, expected, strict=True):
        assert (mine.name, mine.sharding_type) == (other.name, other.sharding_type)
        assert [(shard.size, shard.perf, shard.storage) for shard in mine.shards] == [
            (shard.size, shard.perf, shard.storage) for shard in other.shards
        ]
        assert len({id(shard.perf) for shard in mine.shards}) == len(mine.shards)


def test_only_small_tables_may_be_copied() -> None:
    plain = {
        "data": {"kind": "synthetic"},
        "features": {"sparse": [{"name": "small"}, {"name": "large"}]},
        "embedding": {"sharding": "auto", "dim": 64},
        "towers": [{"name": "deep", "kind": "mlp", "loss": {}}],
        "train": {"steps": 1, "local_batch_size": 64},
    }
    config, _ = apply_preset(Config.model_validate(plain))
    tables = [Table("small", 100, 64, False), Table("large", 100_000, 64, False)]
    collection = collection_of(tables, [key_of(0), key_of(1)], weighted=False)
    machines = {"world_size": 4, "compute_device": "cuda", "local_world_size": 4, "hbm_cap": 2**34}
    plan, _ = place_tables(config, tables, collection, machines)
    assert plan.tables["large"].sharding != DATA_PARALLEL
