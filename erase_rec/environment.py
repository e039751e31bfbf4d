"""Versions: which torch/fbgemm/torchrec belong together, and what a run folder records of its machine."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from erase_rec import __version__

TESTED_TRIPLES = (("2.13.0", "1.8.0", "1.8.0"), ("2.11.0", "1.6.0", "1.6.1"))
"""torch, fbgemm-gpu (or fbgemm-gpu-cpu), torchrec."""


def installed(*names: str) -> str | None:
    """Version of the first of the distributions ``names`` that is installed, without its local part (``+cpu``)."""
    for name in names:
        try:
            return version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    return None


def triple() -> tuple[str | None, str | None, str | None]:
    """Installed versions of torch, fbgemm and torchrec; imports none of them."""
    return installed("torch"), installed("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm_gpu"), installed("torchrec")


def triple_problem(found: tuple[str | None, str | None, str | None]) -> str | None:
    """Why TorchRec cannot be used with the versions ``found``; None for a tested triple."""
    if found in TESTED_TRIPLES:
        return None
    named = ", ".join(
        f"{name} {have or 'missing'}" for name, have in zip(("torch", "fbgemm", "torchrec"), found, strict=True)
    )
    tested = " or ".join("/".join(versions) for versions in TESTED_TRIPLES)
    return f"TorchRec needs versions that belong together (torch/fbgemm/torchrec {tested}); found {named}"


def git_commit() -> str | None:
    """Commit of this checkout, ``+changes`` where files differ from it; None outside a repository."""
    folder = Path(__file__).resolve().parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+changes" if changes else "")


def describe() -> dict[str, str]:
    """Versions, machine and commit, for the run folder."""
    torch_version, fbgemm, torchrec = triple()
    entries = {
        "erase_rec": __version__,
        "python": platform.python_version(),
        "torch": torch_version,
        "fbgemm": fbgemm,
        "torchrec": torchrec,
        "numpy": installed("numpy"),
        "pyarrow": installed("pyarrow"),
        "platform": platform.platform(),
        "git_commit": git_commit(),
    }
    return {name: value or "none" for name, value in entries.items()}
