"""``timeline.json`` of a run: the measured operations of one late step, for charts that are drawn once somebody looks.

Drawing one takes as long as many steps and loads a plotting library, which training does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter, ValidationError

from erase_rec.errors import UserError
from erase_rec.schedule.measured_streams import Interval

TIMELINE_FILE = "timeline.json"


@dataclass(frozen=True)
class StepTimeline:
    """One measured step of a run's first rank.

    Attributes:
        step: its number, from 1.
        rows: of this rank.
        intervals: its operations in launch order.
        critical_path: keys of the longest chain of operations that the program orders.
    """

    step: int
    rows: int
    intervals: tuple[Interval, ...]
    critical_path: tuple[str, ...]

    def write(self, folder: Path) -> None:
        """Writes the file; a kill leaves the old one or the new one."""
        path = folder / TIMELINE_FILE
        partial = path.with_name(f"{TIMELINE_FILE}.partial")
        partial.write_bytes(_FORMAT.dump_json(self) + b"\n")
        partial.replace(path)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Reads the file; None where the run has none: it did not come to its end, or is of an earlier version.

        Raises:
            UserError: it is not as a run leaves it.
        """
        path = folder / TIMELINE_FILE
        try:
            found = _FORMAT.validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); copy the run folder again") from error
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            raise UserError(
                f"{path}: {place}: {first['msg']}; copy the run folder again, or remove the file"
            ) from error
        assert isinstance(found, cls)
        return found


_FORMAT = TypeAdapter(StepTimeline)
