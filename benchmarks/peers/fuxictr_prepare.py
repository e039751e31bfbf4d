"""FuxiCTR's own preprocessing of a Criteo file, timed; run by the Python of an environment of its own (see README.md).

    PEER_PYTHON benchmarks/peers/fuxictr_prepare.py --input train.tsv --out DIR [--min-count 10]

Numbers are taken as they are, each category column gets a vocabulary: the least that its feature types do. Neither its
imports, nor the start of Ray (in versions that use it), nor the copy with the header line that it needs are timed. The
last line printed is JSON.
"""

import argparse
import importlib.metadata
import json
import logging
import os
import shutil
import time
from pathlib import Path

from fuxictr import preprocess

DENSE = [f"I{index}" for index in range(1, 14)]
SPARSE = [f"C{index}" for index in range(1, 27)]
FEATURES = [
    {"name": DENSE, "active": True, "dtype": "float", "type": "numeric"},
    {"name": SPARSE, "active": True, "dtype": "str", "type": "categorical"},
]


def with_header(source: Path, folder: Path) -> Path:
    """A copy of ``source`` that FuxiCTR reads: a header line, and a name that ends in ``.csv``."""
    folder.mkdir(parents=True)
    copy = folder / "train.csv"
    with source.open("rb") as rows, copy.open("wb") as file:
        file.write("\t".join(["label", *DENSE, *SPARSE]).encode() + b"\n")
        shutil.copyfileobj(rows, file, 1 << 24)
    return copy


def main() -> None:
    """Preprocesses once and prints rows, seconds and version."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--input", type=Path, required=True, help="TAB separated, no header.")
    parser.add_argument("--out", type=Path, required=True, help="A folder to be; it is left there.")
    parser.add_argument("--min-count", type=int, default=10)
    arguments = parser.parse_args()
    source = with_header(arguments.input, arguments.out / "raw")
    logging.disable(logging.WARNING)
    if hasattr(preprocess, "init_ray"):
        preprocess.init_ray()
    os.sync()  # the copy above is not to be written to the disk during the measurement
    start_s = time.perf_counter()
    processor = preprocess.FeatureProcessor(
        feature_cols=FEATURES,
        label_col={"name": "label", "dtype": "float"},
        dataset_id="prepared",
        data_root=str(arguments.out),
    )
    preprocess.build_dataset(processor, train_data=str(source), sep="\t", min_categr_count=arguments.min_count)
    seconds = time.perf_counter() - start_s
    written = arguments.out / "prepared" / "train.parquet"
    print(json.dumps({"version": importlib.metadata.version("fuxictr"), "s": seconds, "bytes": written.stat().st_size}))


if __name__ == "__main__":
    main()
