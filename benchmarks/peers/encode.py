"""Writes the rows of ``configs/objectives`` as this project encodes them, for peers to train on.

    python benchmarks/peers/encode.py movielens frappe adult sparrow criteo --out build/peers

So no peer's preprocessing decides anything: vocabularies, transforms, splits, embedding size and batch are those of our
own arms. Numbers are standardized besides, as peers that make a vector of each number want them small. ``OUT/SET`` gets
``fields.json`` and an ``.npz`` for each of training, validation and test rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.rows import Part, write_part
from data.dataset import build_datasets, build_eval
from data.features.columns import columns_of, features_of
from data.loader import Loader
from erase_rec.api.assembly import ContentCatalog
from erase_rec.batch import Batch
from erase_rec.config.load import load_config
from erase_rec.config.schema import Config

IN_ORDER = ("data.shuffle=false", "train.local_batch_size=8192", "run.name=peers")


def part_of(loader: Loader, names: list[str], bags: list[int]) -> Part:
    """All rows of a loader, in its order."""
    batches = list(loader.batches(0))
    columns = [list(_columns(batch)) for batch in batches]
    single = [at for at in range(len(names)) if at not in bags]
    ids = [torch.stack([values[at][0] for at in single], dim=1) for values in columns]
    return Part(
        dense=torch.cat([batch.dense for batch in batches]).numpy(),
        ids=torch.cat(ids).to(torch.int32).numpy(),
        bags={names[at]: _padded([values[at] for values in columns]) for at in bags},
        label=torch.cat([batch.label for batch in batches]).numpy(),
    )


def _columns(batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Values and lengths of each feature's bags."""
    lengths = batch.sparse.lengths.view(batch.sparse.num_features, -1)
    totals = lengths.sum(1).tolist()
    yield from zip(batch.sparse.values[: sum(totals)].split(totals), lengths, strict=True)


def _padded(bags: list[tuple[torch.Tensor, torch.Tensor]]) -> np.ndarray:
    lengths = torch.cat([lengths for _, lengths in bags]).long()
    padded = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int32)
    padded[torch.arange(padded.shape[1]) < lengths[:, None]] = torch.cat([values for values, _ in bags]).int() + 1
    return padded.numpy()


def fields_of(
    config: Config, num_rows: int, table_rows: Mapping[str, int], bags: dict[str, tuple[int, int]]
) -> dict[str, object]:
    """What ``rows.read_fields`` reads.

    Args:
        config: as it is written.
        num_rows: to train on.
        table_rows: in feature order.
        bags: rows and longest bag of multi-valued features.
    """
    stopping = config.train.early_stopping
    return {
        "dense": columns_of(*config.features.dense),
        "tables": {name: rows for name, rows in table_rows.items() if name not in bags},
        "bags": bags,
        "dim": config.embedding.dim,
        "batch_size": config.train.local_batch_size,
        "epochs": config.train.epochs or 1,
        "eval_every_steps": config.train.eval_every_steps or -(-num_rows // config.train.local_batch_size),
        "patience": stopping.patience if stopping else 1,
    }


def encode(name: str, config_name: str, out: Path, overrides: list[str]) -> None:
    """Writes one set."""
    written = load_config(config_name, overrides, catalog=ContentCatalog()).config
    config = load_config(config_name, [*overrides, *IN_ORDER], catalog=ContentCatalog()).config
    datasets = build_datasets(config)
    sparse = [feature for feature in features_of(config.features) if feature in config.features.sparse]
    names = [feature.name for feature in sparse]
    bags = [at for at, feature in enumerate(sparse) if feature.multi_valued]
    assert datasets.eval is not None, "every set has validation rows"
    parts = {"train": part_of(datasets.train, names, bags), "valid": part_of(datasets.eval, names, bags)}
    test = Path(str(config.data.eval[0])).with_name("test.parquet")
    if test.exists():
        at_test = load_config(config_name, [*overrides, *IN_ORDER, f"data.eval={test}"], catalog=ContentCatalog())
        parts["test"] = part_of(build_eval(at_test.config, datasets.features).loader, names, bags)
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    longest = {names[at]: max(part.bags[names[at]].shape[1] for part in parts.values()) for at in bags}
    rows = {key: datasets.table_rows[key] for key in names}
    fields = fields_of(
        written, parts["train"].num_rows, rows, {key: (rows[key], length) for key, length in longest.items()}
    )
    (folder / "fields.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    mean, deviation = parts["train"].dense.mean(0), np.maximum(parts["train"].dense.std(0), 1e-6)
    for part, found in parts.items():
        padded = {key: np.pad(ids, ((0, 0), (0, longest[key] - ids.shape[1]))) for key, ids in found.bags.items()}
        write_part(folder / f"{part}.npz", Part((found.dense - mean) / deviation, found.ids, padded, found.label))
    print(f"{folder}: {', '.join(f'{found.num_rows:,} {part}' for part, found in parts.items())} rows")


def main() -> None:
    """Writes the named sets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", help="of configs/objectives, or NAME=CONFIG")
    parser.add_argument("--out", type=Path, default=Path("build/peers"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override of a configuration")
    arguments = parser.parse_args()
    for each in arguments.sets:
        name, _, config = each.partition("=")
        encode(name, config or f"objectives/{name}.yaml", arguments.out, arguments.set)


if __name__ == "__main__":
    main()
