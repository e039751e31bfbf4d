"""What ``erase-rec doctor`` says of the machine: first everything is looked at, then each fact is judged."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from data.memory import available_bytes
from erase_rec.environment import Versions, triple_problem

Level = Literal["ok", "warning", "problem"]

GIB = 1 << 30
LITTLE_MEMORY = 2 * GIB
LITTLE_DISK, NO_DISK = 10 * GIB, GIB
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
FEW_CONNECTIONS = 8
"""Hardware queues that a process gets by default: with more streams than queues, two streams wait for each other."""


@dataclass(frozen=True)
class Check:
    """A line of the result.

    Attributes:
        name: what was looked at.
        level: ``problem``: training would fail or be wrong; ``warning``: it would be slower or lack something.
        found: what is there.
        way_out: what to do; empty where all is well.
    """

    name: str
    level: Level
    found: str
    way_out: str = ""

    @classmethod
    def of_error(cls, name: str, message: str) -> Check:
        """A problem from a user's error, which ends with the way out after a semicolon."""
        found, _, way_out = message.rpartition("; ")
        return cls(name, "problem", found, way_out) if found else cls(name, "problem", message, "correct it")


@dataclass(frozen=True)
class Gpu:
    """A CUDA device that torch can use; memory in bytes."""

    name: str
    capability: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Seen:
    """Facts of this machine and process.

    Attributes:
        python: version.
        versions: of the packages.
        fbgemm_is_cpu: FBGEMM is the build without CUDA.
        torchrec_error: why TorchRec does not import, though its set of versions fits; None: it does.
        torch_cuda: CUDA that torch was built for; None: a CPU build.
        gpus: usable devices.
        driver: version of NVIDIA's driver; None: there is none.
        nccl: version in torch; None: none.
        capture_error: why no CUDA graph can be captured; None: it can, or there is no device.
        connections: ``CUDA_DEVICE_MAX_CONNECTIONS``; None: not set.
        triton: version; None: not installed.
        cores: that this process may use.
        memory_bytes: that it may still take; None: unknown.
        disk_bytes: free where runs are written; None: unknown.
        disk_folder: which folder that is.
    """

    python: str
    versions: Versions
    fbgemm_is_cpu: bool
    torchrec_error: str | None
    torch_cuda: str | None
    gpus: tuple[Gpu, ...]
    driver: str | None
    nccl: str | None
    capture_error: str | None
    connections: str | None
    triton: str | None
    cores: int
    memory_bytes: int | None
    disk_bytes: int | None
    disk_folder: str


def look(run_folder: Path) -> Seen:
    """Looks at this machine; loads torch (and TorchRec), and captures a tiny CUDA graph where there is a device.

    Args:
        run_folder: where runs are written; need not exist.
    """
    import torch

    versions = Versions.read()
    gpus = tuple(map(_gpu, range(torch.cuda.device_count()))) if torch.cuda.is_available() else ()
    folder = next(path for path in (run_folder.absolute(), *run_folder.absolute().parents) if path.exists())
    try:
        disk = shutil.disk_usage(folder).free
    except OSError:
        disk = None
    return Seen(
        python=platform.python_version(),
        versions=versions,
        fbgemm_is_cpu=_installed("fbgemm-gpu") is None and _installed("fbgemm-gpu-cpu") is not None,
        torchrec_error=None if triple_problem(versions) else _import_error("torchrec.modules.fused_embedding_modules"),
        torch_cuda=torch.version.cuda,
        gpus=gpus,
        driver=_driver(),
        nccl=_nccl_version() if gpus else None,
        capture_error=_capture_error() if gpus else None,
        connections=os.environ.get(CONNECTIONS),
        triton=_installed("triton"),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=available_bytes(),
        disk_bytes=disk,
        disk_folder=str(folder),
    )


def machine_checks(seen: Seen) -> list[Check]:
    """Judges what was seen; always the same names in the same order."""
    return [
        Check("python", "ok", seen.python),
        _packages(seen),
        _gpus(seen),
        _nccl(seen),
        _graphs(seen),
        _connections(seen),
        _triton(seen),
        _cores(seen),
        _memory(seen),
        _disk(seen),
    ]


def _packages(seen: Seen) -> Check:
    named = {"torch": seen.versions.torch, "fbgemm": seen.versions.fbgemm, "torchrec": seen.versions.torchrec}
    found = ", ".join(f"{name} {have or 'missing'}" for name, have in named.items())
    if seen.versions.torchrec is None and seen.versions.fbgemm is None:
        way_out = "for TorchRec's tables: pip install torchrec and the FBGEMM of your torch; else nothing"
        return Check("packages", "warning", f"{found}; tables are plain PyTorch's", way_out)
    if problem := triple_problem(seen.versions):
        return Check("packages", "warning", f"{problem}; until then tables are plain PyTorch's", "see requirements/")
    if seen.torchrec_error:
        return Check("packages", "warning", f"{found}; TorchRec does not import: {seen.torchrec_error}", "reinstall it")
    if seen.gpus and seen.fbgemm_is_cpu:
        return Check("packages", "warning", f"{found}; FBGEMM is the CPU build", "install fbgemm-gpu of this version")
    return Check("packages", "ok", f"{found}: a tested set")


def _gpus(seen: Seen) -> Check:
    if seen.gpus:
        named = ", ".join(f"{gpu.name} ({gpu.capability}, {in_gib(gpu.free_bytes)} free)" for gpu in seen.gpus)
        return Check(
            "gpu", "ok", f"{named}; driver {seen.driver or 'unknown'}; torch is built for CUDA {seen.torch_cuda}"
        )
    if seen.driver is None:
        return Check("gpu", "ok", "none, so training runs on the CPU")
    if seen.torch_cuda is None:
        way_out = "install a CUDA build of torch (requirements/cuda.lock)"
        return Check("gpu", "warning", f"driver {seen.driver}, but torch is a CPU build", way_out)
    found = f"driver {seen.driver}, but torch (CUDA {seen.torch_cuda}) sees no device"
    return Check("gpu", "warning", found, "look at nvidia-smi, CUDA_VISIBLE_DEVICES and the driver's age")


def _nccl(seen: Seen) -> Check:
    if seen.nccl:
        return Check("nccl", "ok", seen.nccl)
    if len(seen.gpus) > 1:
        found = "torch has no NCCL, so several ranks would exchange gradients through host memory"
        return Check("nccl", "warning", found, "install a build of torch with NCCL")
    return Check("nccl", "ok", "not needed: ranks on the CPU use gloo" if not seen.gpus else "not needed with one GPU")


def _graphs(seen: Seen) -> Check:
    if not seen.gpus:
        return Check("cuda_graphs", "ok", "no CUDA device; presets with CUDA graphs run uncaptured")
    if seen.capture_error:
        way_out = "update driver and torch, or use schedule.cuda_graph=none"
        return Check("cuda_graphs", "problem", f"a graph cannot be captured: {seen.capture_error}", way_out)
    return Check("cuda_graphs", "ok", "a graph was captured and replayed")


def _connections(seen: Seen) -> Check:
    name = "connections"
    if not seen.gpus:
        return Check(name, "ok", f"{CONNECTIONS} has no meaning without a CUDA device")
    way_out = f"export {CONNECTIONS}=32 before training"
    if seen.connections is None:
        return Check(name, "warning", f"{CONNECTIONS} is not set: towers share {FEW_CONNECTIONS} queues", way_out)
    if not seen.connections.isdigit() or not 1 <= int(seen.connections) <= 32:
        return Check(name, "problem", f"{CONNECTIONS}={seen.connections!r}, expected 1 to 32", way_out)
    if int(seen.connections) <= FEW_CONNECTIONS:
        return Check(name, "warning", f"{CONNECTIONS}={seen.connections}: streams may wait for each other", way_out)
    return Check(name, "ok", f"{CONNECTIONS}={seen.connections}")


def _triton(seen: Seen) -> Check:
    if seen.triton:
        return Check("triton", "ok", seen.triton)
    if seen.gpus:
        found = "missing, so towers and tables run PyTorch's operations instead of this project's kernels"
        return Check("triton", "warning", found, "pip install the triton of your torch")
    return Check("triton", "ok", "missing; only kernels for CUDA need it")


def _cores(seen: Seen) -> Check:
    if seen.cores == 1:
        way_out = "give the process more cores, or keep data.workers=0 and train.threads=1"
        return Check("cores", "warning", "1, which reading and training share", way_out)
    return Check("cores", "ok", str(seen.cores))


def _memory(seen: Seen) -> Check:
    if seen.memory_bytes is None:
        return Check("memory", "warning", "the system does not say how much is free", "watch it while training")
    if seen.memory_bytes < LITTLE_MEMORY:
        way_out = "end other programs, or raise the container's limit"
        return Check("memory", "warning", f"{in_gib(seen.memory_bytes)} free", way_out)
    return Check("memory", "ok", f"{in_gib(seen.memory_bytes)} free")


def _disk(seen: Seen) -> Check:
    if seen.disk_bytes is None:
        return Check("disk", "warning", f"the space at {seen.disk_folder} is unknown", "watch it while training")
    level: Level = "problem" if seen.disk_bytes < NO_DISK else "warning" if seen.disk_bytes < LITTLE_DISK else "ok"
    way_out = "" if level == "ok" else "make room for checkpoints, or write elsewhere with run.dir"
    return Check("disk", level, f"{in_gib(seen.disk_bytes)} free at {seen.disk_folder}", way_out)


def in_gib(num_bytes: int) -> str:
    """An amount of memory for people."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


def _gpu(index: int) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return Gpu(properties.name, f"sm_{properties.major}{properties.minor}", total, free)


def _nccl_version() -> str | None:
    import torch

    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _capture_error() -> str | None:
    import torch

    try:
        number = torch.zeros(1, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            number.add_(1)
        graph.replay()
        found = number.item()  # host synchronisation: the replay has to have ended
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None if found == 1 else f"the replay gave {found}, expected 1"


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(result.stdout.split()), None)


def _import_error(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        return str(error)
    return None


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
