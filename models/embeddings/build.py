"""Chooses the embedding backend and builds the tables."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import torch

from erase_rec.config.schema import Config
from erase_rec.environment import triple, triple_problem
from erase_rec.errors import UserError
from erase_rec.protocols import Embeddings
from models.embeddings.layout import tables_of
from models.embeddings.torch_backend import TorchEmbeddings


def choose_backend(config: Config, device: torch.device) -> tuple[str, str]:
    """The backend to use and why, in one line.

    Raises:
        UserError: ``embedding.backend: torchrec`` cannot be had.
    """
    wanted = config.embedding.backend
    if wanted == "torch":
        return "torch", "as configured"
    problem = _torchrec_problem(config, device)
    if problem is None:
        return "torchrec", "as configured" if wanted == "torchrec" else "TorchRec and FBGEMM are here"
    if wanted == "torchrec":
        raise UserError(f"embedding.backend: torchrec: {problem}; use embedding.backend=torch")
    return "torch", problem


def build_embeddings(config: Config, table_rows: Mapping[str, int], device: torch.device) -> Embeddings:
    """Builds the tables of ``config`` on ``device``.

    Args:
        config: features, dimensions, backend and sparse optimizer.
        table_rows: rows of each feature's table.
        device: where they live.
    """
    tables = tables_of(config, table_rows)
    backend, _ = choose_backend(config, device)
    if backend == "torch":
        return TorchEmbeddings(tables, config.optimizer.sparse, seed=config.seed, device=device)
    from models.embeddings.torchrec_backend import TorchRecEmbeddings  # needs torchrec

    return TorchRecEmbeddings(tables, config.optimizer.sparse, seed=config.seed, device=device)


def _torchrec_problem(config: Config, device: torch.device) -> str | None:
    """Why TorchRec cannot serve this configuration here; None when it can."""
    problem = triple_problem(triple())
    if problem is not None:
        return problem
    if not config.features.sparse:
        return "there are no sparse features"
    if config.optimizer.sparse.kind == "adam" and device.type == "cpu":
        return "FBGEMM has no Adam on the CPU"
    dims = {feature.embedding_dim or config.embedding.dim for feature in config.features.sparse}
    if any(dim % 4 for dim in dims):
        return f"FBGEMM needs embedding dimensions that are multiples of 4, found {sorted(dims)}"
    try:
        importlib.import_module("torchrec.modules.fused_embedding_modules")
    except (ImportError, OSError) as error:
        return f"TorchRec does not import ({error})"
    return None
