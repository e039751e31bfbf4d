"""Versions: which torch/fbgemm/torchrec belong together, and what a run folder records of its machine."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from erase_rec import __version__

TESTED_TRIPLES = (("2.13.0", "1.8.0", "1.8.0"), ("2.11.0", "1.6.0", "1.6.1"))
"""torch, fbgemm-gpu (or fbgemm-gpu-cpu), torchrec. FBGEMM's kernels are built against one torch release."""

_FBGEMM_NAMES = ("fbgemm-gpu", "fbgemm-gpu-cpu")


@dataclass(frozen=True)
class Versions:
    """Installed versions, without local parts such as ``+cpu``; None: not installed.

    Read from the distributions' metadata: nothing is imported, so a set that does not belong together is named
    before its libraries fail to load.
    """

    torch: str | None
    fbgemm: str | None
    torchrec: str | None
    numpy: str | None
    pyarrow: str | None

    @classmethod
    def read(cls) -> Versions:
        """The versions that an import would find, whether installed or unpacked on ``PYTHONPATH``."""
        return cls(
            _installed("torch"),
            _installed(*_FBGEMM_NAMES),
            _installed("torchrec"),
            _installed("numpy"),
            _installed("pyarrow"),
        )


def triple_problem(versions: Versions | None = None) -> str | None:
    """Why TorchRec cannot be used with these versions, in one sentence; None for a tested triple.

    Args:
        versions: None: the installed ones.
    """
    versions = versions or Versions.read()
    found = {"torch": versions.torch, "fbgemm-gpu": versions.fbgemm, "torchrec": versions.torchrec}
    if tuple(found.values()) in TESTED_TRIPLES:
        return None
    named = ", ".join(f"{name} {have or 'missing'}" for name, have in found.items())
    tested = " or ".join("/".join(triple) for triple in TESTED_TRIPLES)
    return f"TorchRec needs torch/fbgemm-gpu/torchrec {tested}, found {named}: install a set that belongs together"


def git_commit() -> str | None:
    """Commit of this checkout, ``+changes`` where tracked files differ from it; None outside a checkout."""
    # An installed copy can lie inside another project's repository: only a tracked file is of a checkout.
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")


def describe() -> dict[str, str]:
    """Versions, machine and commit, for the run folder; ``none`` where something is missing. Loads torch."""
    import torch

    versions = Versions.read()
    entries = {
        "erase_rec": __version__,
        "python": platform.python_version(),
        "torch": versions.torch,
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "fbgemm": versions.fbgemm,
        "torchrec": versions.torchrec,
        "numpy": versions.numpy,
        "pyarrow": versions.pyarrow,
        "platform": platform.platform(),
        "git_commit": git_commit(),
    }
    return {name: value or "none" for name, value in entries.items()}


def _installed(*names: str) -> str | None:
    """Version of the first of the distributions ``names`` that is here."""
    for name in names:
        try:
            return version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    return None


def _git(*arguments: str) -> str | None:
    """Output of a git command in this file's folder; None where it fails or there is no git."""
    try:
        result = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
