"""One rank of several: trains rows of the paper's table one after the other, each row in a process group of its own."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from table1_cases import Setting


def main(setting: Setting, folder: Path, ports: dict[str, str]) -> None:
    """Under torchrun; ``ports``: of the store that each row's ranks meet at."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    for row, port in ports.items():
        os.environ["MASTER_PORT"] = port
        print(setting.run_here(row, folder / row, int(os.environ["WORLD_SIZE"])))


if __name__ == "__main__":
    # Fresh processes: here it shows that training wakes autograd's thread.
    warnings.filterwarnings("error", "Attempting to run cuBLAS, but there was no current CUDA context")
    device, steps, rows, where, *meetings = sys.argv[1:]
    main(Setting(device, int(steps), int(rows)), Path(where), dict(meeting.split("=") for meeting in meetings))
