"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

from data.errors import DataError

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_bytes(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int | None:
    """What the machine and the control group of a container leave; None where the system does not say.

    Args:
        cgroup: mount point of control groups, version 2.
        meminfo: the kernel's account of the machine's memory.
    """
    bounds = [bound for bound in (_left_by_machine(meminfo), _left_by_cgroup(cgroup)) if bound is not None]
    return min(bounds, default=None)


def refuse_too_much(key: str, held: int, read: int, total: int, available: int | None) -> None:
    """Ends reading into memory before the system would end the process.

    Args:
        key: what is read, for the message.
        held: bytes that the rows read so far take.
        read: bytes of input that they were read from.
        total: bytes of input.
        available: memory that is left; None: it is not known, and nothing is refused.

    Raises:
        DataError: the rows that are still to come will take more.
    """
    needed = held * total // max(1, read)
    if available is None or needed - held <= available:
        return
    raise DataError(
        f"{key}: its rows take about {needed / 2**30:.1f} GiB in memory, and there are only "
        f"{(available + held) / 2**30:.1f} GiB for them; prepare them (erase-rec prepare) and train with "
        "data.prepared, or read them anew in each epoch with data.reading: stream"
    )


def _left_by_machine(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    amounts = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return amounts[0] * 1024 if amounts else None


def _left_by_cgroup(cgroup: Path) -> int | None:
    """Cached pages of files that were not used lately count as free, as the kernel gives them up first."""
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        account = dict(line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:
        return None
    return None if limit == "max" else int(limit) - used + int(account.get("inactive_file", 0))
