"""All fuzz targets."""

from __future__ import annotations

import fuzz_folders
import fuzz_rows
import fuzz_texts
from fuzz_target import Target

TARGETS: dict[str, Target] = {
    target.name: target for target in (*fuzz_texts.TARGETS, *fuzz_rows.TARGETS, *fuzz_folders.TARGETS)
}
"""By name, in the order in which they are listed."""
