"""The index of a checkpoint's tensors, read without running what somebody may have put into it.

torch.distributed.checkpoint keeps the index (``.metadata``) as a pickle and loads it as one, so whoever can write a
checkpoint can have any code run by whoever reads it. Here nothing is looked up but the classes that an index consists
of, and what comes out is checked; tensors themselves torch reads with ``weights_only``.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

MAX_BYTES = 256 << 20
"""An index takes about 200 bytes a tensor or part of one."""

_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = frozenset(
    {
        *(
            (_METADATA, name)
            for name in (
                *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "MetadataIndex"),
                *("ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"),
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
    }
)
_PATHS = frozenset({("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib._local", "PosixPath")})


class IndexReader(FileSystemReader):
    """Reads the tensors of a checkpoint's folder, whose index it takes for hostile."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index.

        Raises:
            OSError: it is not there, or larger than any index.
            pickle.UnpicklingError: it is none.
        """
        path = Path(self.path) / ".metadata"
        if path.stat().st_size > MAX_BYTES:
            raise OSError(f"the index has {path.stat().st_size:,} bytes, more than any")
        metadata = read_index(path.read_bytes())
        metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return metadata


def read_index(content: bytes) -> Metadata:
    """The index in a pickle.

    Raises:
        pickle.UnpicklingError: it is none, or it names anything else than an index consists of.
    """
    try:
        found = _Unpickler(io.BytesIO(content)).load()
        _check(found)
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error
    metadata: Metadata = found
    return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PATHS:
            return PurePosixPath  # where the checkpoint was written, which nobody needs
        if (module, name) in _CLASSES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in an index of tensors")


def _check(found: Any) -> None:
    """Refuses what has the classes of an index and not its values."""
    _expect(isinstance(found, Metadata), "it is no index of tensors")
    _expect(isinstance(found.state_dict_metadata, dict) and isinstance(found.storage_data, dict), "it lists nothing")
    _expect(hasattr(found.storage_meta, "load_id"), "it does not say what it is of")
    for name, entry in found.state_dict_metadata.items():
        _expect(isinstance(name, str) and isinstance(entry, TensorStorageMetadata | BytesStorageMetadata), repr(name))
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(name, entry)
    for place in found.storage_data.values():
        path = place.relative_path
        _expect(isinstance(path, str) and Path(path).name == path and path != "..", f"a tensor in {path!r}")
        _expect(_counts((place.offset, place.length)), f"a tensor at {place.offset!r}, {place.length!r} bytes long")


def _check_tensor(name: str, entry: TensorStorageMetadata) -> None:
    _expect(isinstance(entry.properties.dtype, torch.dtype), f"{name} has no dtype")
    _expect(isinstance(entry.size, torch.Size) and _counts(entry.size), f"{name} has no shape")
    for chunk in entry.chunks:
        fits = len(chunk.offsets) == len(chunk.sizes) == len(entry.size) and _counts((*chunk.offsets, *chunk.sizes))
        ends = (start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        _expect(
            fits and all(end <= most for end, most in zip(ends, entry.size, strict=True)), f"{name}: a part outside"
        )


def _counts(values: Any) -> bool:
    return all(isinstance(value, int) and value >= 0 for value in values)


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise pickle.UnpicklingError(f"the index is damaged: {what}")
