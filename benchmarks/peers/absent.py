"""Stands in for modules that peers import and that nothing here uses; imported before them.

FuxiCTR imports polars, for metrics of groups, and Ray, for preprocessing and Parquet: rows come encoded, and NE and AUC
are computed here. DeepCTR-Torch asks PyPI for its newest version at import. TorchRec before 1.8 imports iopath, with
which it reads Criteo's files.
"""

from __future__ import annotations

import sys
import types


def stand_in(name: str, **contents: object) -> None:
    """Makes ``import name`` succeed."""
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


stand_in("polars")
stand_in("ray")
stand_in("fuxictr.preprocess")
stand_in("fuxictr.preprocess.tokenizer", load_pretrain_emb=None)
stand_in("requests")
stand_in("iopath")
stand_in("iopath.common")
stand_in("iopath.common.file_io", PathManager=None, PathManagerFactory=None)
