"""``erase-rec doctor``: each fact of a machine is judged as it should be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from erase_rec.cli.doctor_machine import GIB, Check, Gpu, Seen, machine_checks
from erase_rec.environment import TESTED_TRIPLES, Versions

TORCH, FBGEMM, TORCHREC = TESTED_TRIPLES[0]
FITTING = Versions(TORCH, FBGEMM, TORCHREC, "2.0", "20.0")
ON_CPU = Seen(
    python="3.11.7",
    versions=FITTING,
    fbgemm_is_cpu=True,
    torchrec_error=None,
    torch_cuda=None,
    gpus=(),
    driver=None,
    nccl=None,
    capture_error=None,
    connections=None,
    triton=None,
    cores=2,
    memory_bytes=16 * GIB,
    disk_bytes=100 * GIB,
    disk_folder="/runs",
)
H200 = Gpu("NVIDIA H200", "sm_90", 139 * GIB, 138 * GIB)
ON_GPU = replace(
    ON_CPU,
    fbgemm_is_cpu=False,
    torch_cuda="13.0",
    gpus=(H200,),
    driver="580.1",
    nccl="2.28.9",
    connections="32",
    triton="3.6.0",
)
NAMES = ["python", "packages", "gpu", "nccl", "cuda_graphs", "connections", "triton", "cores", "memory", "disk"]


@pytest.mark.parametrize("seen", [ON_CPU, ON_GPU])
def test_a_good_machine_is_well(seen: Seen) -> None:
    checks = machine_checks(seen)
    assert [check.name for check in checks] == NAMES
    assert [check for check in checks if check.level != "ok"] == []
    assert not any(check.way_out for check in checks)


@pytest.mark.parametrize(
    ("seen", "name", "level", "found"),
    [
        (replace(ON_CPU, versions=replace(FITTING, fbgemm="1.0.0")), "packages", "warning", "found torch"),
        (replace(ON_CPU, versions=Versions(TORCH, None, None, "2", "2")), "packages", "warning", "torchrec missing"),
        (replace(ON_CPU, torchrec_error="no libfoo"), "packages", "warning", "does not import: no libfoo"),
        (replace(ON_GPU, fbgemm_is_cpu=True), "packages", "warning", "FBGEMM is the CPU build"),
        (replace(ON_CPU, driver="580.1"), "gpu", "warning", "torch is a CPU build"),
        (replace(ON_CPU, driver="580.1", torch_cuda="13.0"), "gpu", "warning", "sees no device"),
        (replace(ON_GPU, nccl=None, gpus=(H200, H200)), "nccl", "warning", "no NCCL"),
        (replace(ON_GPU, capture_error="operation not permitted"), "cuda_graphs", "problem", "not permitted"),
        (replace(ON_GPU, connections=None), "connections", "warning", "is not set"),
        (replace(ON_GPU, connections="8"), "connections", "warning", "may wait"),
        (replace(ON_GPU, connections="64"), "connections", "problem", "expected 1 to 32"),
        (replace(ON_GPU, connections="many"), "connections", "problem", "'many'"),
        (replace(ON_GPU, triton=None), "triton", "warning", "missing"),
        (replace(ON_CPU, cores=1), "cores", "warning", "1"),
        (replace(ON_CPU, memory_bytes=GIB), "memory", "warning", "1.0 GiB free"),
        (replace(ON_CPU, memory_bytes=None), "memory", "warning", "does not say"),
        (replace(ON_CPU, disk_bytes=5 * GIB), "disk", "warning", "5.0 GiB free at /runs"),
        (replace(ON_CPU, disk_bytes=GIB // 2), "disk", "problem", "0.5 GiB free at /runs"),
        (replace(ON_CPU, disk_bytes=None), "disk", "warning", "unknown"),
    ],
)
def test_what_is_amiss_is_said_with_the_way_out(seen: Seen, name: str, level: str, found: str) -> None:
    checks = machine_checks(seen)
    assert [check.name for check in checks] == NAMES
    (amiss,) = [check for check in checks if check.level != "ok"]
    assert (amiss.name, amiss.level) == (name, level)
    assert found in amiss.found
    assert amiss.way_out


def test_a_users_error_is_cut_into_what_and_way_out() -> None:
    assert Check.of_error("data", "file 'a' not found; 'x' holds 'b'; name it") == Check(
        "data", "problem", "file 'a' not found; 'x' holds 'b'", "name it"
    )
    assert Check.of_error("config", "is wrong").way_out == "correct it"
