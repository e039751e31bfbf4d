"""Trains this project's configurations for the comparison of speed; one JSON object a line, in and out.

In one process, so that imports are not paid in each turn; ``Trainer`` is what ``erase-rec train`` calls.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from erase_rec import Config, Trainer


def main() -> None:
    """Answers each line: a configuration's file, and overrides."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        task = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            overrides = [*task["overrides"], f"run.dir={folder}"]
            summary = Trainer(Config.from_yaml(task["config"], overrides), progress=False).fit()
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        answer = {"rows_per_s": summary.throughput.qps_mean, "peak_mib": peak_mib}
        print(json.dumps(task | answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
