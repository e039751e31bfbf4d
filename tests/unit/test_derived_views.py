"""Cells of CSV files, which Arrow gives as string views."""

from __future__ import annotations

import pyarrow as pa
import pytest

from data.features.cells import BadCellsError
from data.features.derived import derive


def test_a_bad_time_among_string_views_is_named() -> None:
    with pytest.raises(BadCellsError, match="'99'"):
        derive(pa.array(["14102123", "99"], pa.string_view()), "hour", ())
