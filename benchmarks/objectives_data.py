"""Writes the six small real sets on which local objectives are compared, as Parquet, split 70/10/20 once for all.

    ERASE_REC_DATA=/path/to/raw python benchmarks/objectives_data.py --out datasets/objectives

Raw files are those of the packages and repositories that publish them (see ``configs/objectives/*.yaml`` for what is
read): Frappe's libfm file becomes ten columns, MovieLens' three tables one. Nothing else is changed. Rows are split by
a permutation of a fixed seed, so that every arm and every later run sees the same training, validation and test rows.
"""

from __future__ import annotations

import argparse
import gzip
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

SPLIT_SEED = 20
SHARES = {"train": 0.7, "valid": 0.1, "test": 0.2}
FRAPPE_FIELDS = 10


def frappe(raw: Path) -> pd.DataFrame:
    """He and Chua's libfm file: label -1 or 1, then one id a field, in one id space."""
    with gzip.open(raw / "frappe_libfm/frappe.validation.libfm.gz", "rt", encoding="ascii") as file:
        rows = [line.split() for line in file]
    columns = {f"f{field}": [row[1 + field].partition(":")[0] for row in rows] for field in range(FRAPPE_FIELDS)}
    return pd.DataFrame({"label": [int(row[0] == "1") for row in rows], **columns})


def movielens(raw: Path) -> pd.DataFrame:
    """Ratings with user and film; the label is a rating of 4 or better."""
    folder = raw / "movielens_parquet"
    ratings, users, items = (
        pd.read_parquet(folder / f"MovieLens100k_{table}.parquet.brotli") for table in ("data", "users", "items")
    )
    genres = [column for column in items.columns if set(items[column].unique()) == {0, 1}]
    items["genres"] = items[genres].apply(lambda row: [name for name in genres if row[name]], axis=1)
    items["release_year"] = pd.to_numeric(items["release_date"].str[-4:], errors="coerce")
    joined = ratings.merge(users, on="user_id").merge(items[["movie_id", "genres", "release_year"]], on="movie_id")
    joined["label"] = (joined["rating"] >= 4).astype(int)
    return joined[["label", "user_id", "movie_id", "age", "gender", "occupation", "zip_code", "genres", "release_year"]]


def adult(raw: Path) -> pd.DataFrame:
    """The census table; the label is an income above 50K."""
    table = pd.read_parquet(raw / "adult_parquet/adult.parquet.brotli")
    table["label"] = (table.pop("income") == ">50K").astype(int)
    table.columns = [str(column).replace("-", "_") for column in table.columns]
    return table


def sparrow(raw: Path) -> pd.DataFrame:
    """SparrowRecSys' samples without the rating, which is the label."""
    table = pd.read_csv(raw / "sparrow_movie_ctr/testSamples.csv.gz")
    table = table.drop(columns=["rating", "timestamp"])
    ids = [column for column in table.columns if column.startswith("userRatedMovie")]
    table[ids] = table[ids].astype("Int64")
    return table


def criteo(raw: Path) -> pd.DataFrame:
    """The first rows of Kaggle's training file, from both files that hold some; hashes stay text."""
    names = ["label", *(f"I{number}" for number in range(1, 14)), *(f"C{number}" for number in range(1, 27))]
    types = {name: "string" if name.startswith("C") else "Int64" for name in names}
    parts = [
        pd.read_csv(raw / f"criteo_first8k/{name}.csv", sep="\t", header=None, names=names, dtype=types)
        for name in ("train", "dev")
    ]
    return pd.concat(parts, ignore_index=True)


def kuaishou(raw: Path) -> pd.DataFrame:
    """Counts and days of a user's use of the app, without the user's id (one row each) and a column of random lists."""
    table = pd.read_csv(raw / "kuaishou_multihot/dataset1.csv.gz", index_col=0)
    return table.drop(columns=["user_id", "multi"])


SETS: dict[str, Callable[[Path], pd.DataFrame]] = {
    "frappe": frappe,
    "movielens": movielens,
    "adult": adult,
    "sparrow": sparrow,
    "criteo": criteo,
    "kuaishou": kuaishou,
}


def split(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows of each part, by a permutation that depends on their number alone."""
    order = np.random.default_rng(SPLIT_SEED).permutation(len(table))
    bounds = (np.cumsum([0.0, *SHARES.values()]) * len(table)).round().astype(int)
    return {part: table.iloc[order[bounds[at] : bounds[at + 1]]] for at, part in enumerate(SHARES)}


def main() -> None:
    """Writes every set, or those named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("datasets/objectives"))
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    arguments = parser.parse_args()
    raw = os.environ.get("ERASE_REC_DATA")
    if raw is None:
        parser.error("set ERASE_REC_DATA to the folder of the raw files")
    for name in arguments.sets:
        folder = arguments.out / name
        folder.mkdir(parents=True, exist_ok=True)
        for part, rows in split(SETS[name](Path(raw))).items():
            rows.to_parquet(folder / f"{part}.parquet", index=False)
            print(f"{folder / part}.parquet: {len(rows):,} rows, label rate {rows['label'].mean():.4f}")


if __name__ == "__main__":
    main()
