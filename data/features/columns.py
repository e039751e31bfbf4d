"""Reading the columns that the features name, with errors that say where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from data.errors import DataError
from data.features.bags import CellBags, read_bags
from data.features.cells import BadCellError, BadColumnError, Cells, FloatArray, read_categories, read_numbers
from data.sources.source import Block
from data.table import Origin
from erase_rec.config.schema import DenseFeatureConfig, FeaturesConfig, SparseFeatureConfig

FeatureConfig = DenseFeatureConfig | SparseFeatureConfig


def features_of(config: FeaturesConfig) -> tuple[FeatureConfig, ...]:
    """All features in model order, the dense ones first."""
    return (*config.dense, *config.sparse)


def column_of(feature: FeatureConfig) -> str:
    """The column that a feature reads."""
    return feature.name if feature.column is None else feature.column


def columns_of(*features: FeatureConfig) -> list[str]:
    """Columns that the features read, each once."""
    weights = [
        feature.weights
        for feature in features
        if isinstance(feature, SparseFeatureConfig) and feature.weights is not None
    ]
    return list(dict.fromkeys([*map(column_of, features), *weights]))


def origin_of(block: Block) -> Origin:
    """Where a block's rows came from."""
    return Origin(block.file, block.first_line, block.unit)


@contextmanager
def placed(block: Block, subject: str, way_out: str = "") -> Iterator[None]:
    """Says where a cell or a column is that cannot be read."""
    try:
        yield
    except BadCellError as error:
        raise DataError(f"{origin_of(block).place(error.row)}: {subject}: {error}{way_out}") from None
    except BadColumnError as error:
        raise DataError(f"{block.file}: {subject}: {error}") from None


def subject_of(feature: FeatureConfig) -> str:
    """What messages call a feature."""
    column = column_of(feature)
    return f"feature {feature.name!r}" + ("" if column == feature.name else f" (column {column!r})")


def read_dense(block: Block, feature: DenseFeatureConfig) -> FloatArray:
    """Raw values of a numeric feature, float64 [rows]; nan: missing.

    Raises:
        DataError: as :func:`data.cells.read_numbers` refuses a cell or the column.
    """
    with placed(block, subject_of(feature), "; correct it or list it in missing_values"):
        return read_numbers(block.columns[column_of(feature)], feature.missing_values)


def read_sparse(block: Block, feature: SparseFeatureConfig) -> Cells | CellBags:
    """Cells of a categorical feature, or bags of them where it is multi-valued.

    Raises:
        DataError: as :mod:`data.cells` refuses a cell or the column.
    """
    column = block.columns[column_of(feature)]
    with placed(block, subject_of(feature)):
        if not feature.multi_valued:
            return read_categories(column, feature.missing_values, feature.fill)
        return read_bags(
            column,
            None if feature.weights is None else block.columns[feature.weights],
            separator=feature.separator,
            max_length=feature.max_length,
            missing_values=feature.missing_values,
            fill=feature.fill,
        )


def cells_of(cells: Cells | CellBags) -> Cells:
    """The cells, whether or not they are in bags."""
    return cells.cells if isinstance(cells, CellBags) else cells
