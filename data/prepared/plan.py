"""What is to be prepared, and whether that is what a folder already holds, finished or half done."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from data.errors import DataError
from data.features.fitted import ENCODINGS_FILE, STATE_FILE
from data.fingerprint import differences, settings
from data.prepared.files import PARTIAL, publish_text
from data.prepared.lock import FILE as LOCK
from data.prepared.manifest import FEATURES, FILE, VERSION, InputRecord, Manifest
from data.prepared.work import SPLITS, WORK
from data.quarantine import FILE as QUARANTINE
from data.reading import Reading, open_eval, open_train
from data.sources.source import Source, Split, positions_of
from erase_rec import __version__
from erase_rec.config.schema import Config

PLAN = "plan.json"


@dataclass(frozen=True)
class Input:
    """A source that is read.

    Attributes:
        source: the source.
        reading: how its rows are read.
        files: what it reads; for rows that are made up, what they are made from.
        first_file: position among all files of its first one.
    """

    source: Source
    reading: Reading
    files: list[InputRecord]
    first_file: int


def open_inputs(config: Config) -> dict[Split, Input]:
    """The sources that ``config`` names; reads no more than headers.

    Raises:
        DataError: files are missing, or the label's column is not known.
    """
    inputs: dict[Split, Input] = {}
    sources: dict[Split, Source | None] = {"train": open_train(config), "eval": open_eval(config)}
    for split, source in sources.items():
        if source is not None:
            reading, files = Reading.of(config, source, split), _files_of(source, split)
            # Now: the evaluation files' turn comes when the others were read.
            positions_of(reading.columns, source.columns(), files[0].name)
            inputs[split] = Input(
                source=source,
                reading=reading,
                files=files,
                first_file=sum(len(each.files) for each in inputs.values()),
            )
    return inputs


def _files_of(source: Source, split: Split) -> list[InputRecord]:
    """What a source reads; for rows that are made up, what they are made from."""
    files = source.inputs()
    if not files:
        return [InputRecord(name=f"made-up {split} rows", num_bytes=source.num_bytes(), version=source.fingerprint())]
    return [InputRecord(name=file.name, num_bytes=file.num_bytes, version=file.version) for file in files]


@dataclass(frozen=True)
class Plan:
    """What decides the content of a prepared folder; JSON."""

    content: dict[str, Any]

    @classmethod
    def of(cls, config: Config, inputs: dict[Split, Input]) -> Self:
        """From a configuration and what it reads."""
        files = {split: each.files for split, each in inputs.items()}
        return cls(_content(settings(config), config.data.bad_rows, config.data.row_id, files, __version__))

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> Self:
        """Of a finished folder."""
        row_id = None if manifest.row_ids is None else manifest.row_ids.column
        version = manifest.made["erase_rec"]
        return cls(_content(manifest.settings, manifest.bad_rows.policy, row_id, manifest.inputs, version))

    def claim(self, folder: Path, *, force: bool) -> Manifest | None:
        """Makes a folder this plan's; its lock is held.

        Args:
            folder: where to write.
            force: throw away what was prepared in it for another plan, or for this one.

        Returns:
            The manifest, where the folder is finished already.

        Raises:
            DataError: the folder holds something else.
        """
        note = folder / WORK / PLAN
        started = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else None
        finished = Manifest.read(folder) if (folder / FILE).is_file() and not force else None
        if foreign := _foreign(folder):
            raise DataError(f"{folder}: holds other files, such as {foreign[0]!r}; name a folder of its own")
        if finished is not None:
            self._refuse_other(folder, Plan.of_manifest(finished))
            return finished
        if force or (started is not None and not _has_finished_groups(folder)):
            _clear(folder)
        elif started is not None:
            self._refuse_other(folder, Plan(started))
        for partial in (*folder.glob(f"*/{PARTIAL}"), *folder.glob(PARTIAL)):
            partial.unlink()
        for split in SPLITS:
            (folder / split).mkdir(exist_ok=True)
        publish_text(note, json.dumps(self.content, indent=1) + "\n")
        return None

    def _refuse_other(self, folder: Path, other: Plan) -> None:
        for key, mine, theirs in differences(self.content, other.content):
            raise DataError(
                f"{folder}: holds a preparation of other data or settings: {key} is {theirs!r} there and {mine!r} now; "
                "name another folder with --out, or throw that one away with --force"
            )


def _content(
    decisive: dict[str, Any],
    bad_rows: str,
    row_id: str | None,
    files: dict[Any, list[InputRecord]],
    version: str,
) -> dict[str, Any]:
    """Files may be called otherwise: they are known by their sizes and versions."""
    return {
        "version": [VERSION, version],
        "settings": decisive,
        "data.bad_rows": bad_rows,
        "data.row_id": row_id,
        "input": {split: [[file.num_bytes, file.version] for file in each] for split, each in files.items()},
    }


def _foreign(folder: Path) -> list[str]:
    """What no preparation wrote. Raw files may well lie in folders called ``train`` and ``eval``."""
    ours = {WORK: ("*",), FEATURES: (STATE_FILE, ENCODINGS_FILE)} | dict.fromkeys(SPLITS, ("part-*.arrow",))
    found = []
    for path in folder.iterdir():
        if path.name in ours and path.is_dir():
            found += [each for each in path.iterdir() if not any(map(each.match, ours[path.name]))]
        elif path.name not in (FILE, QUARANTINE):
            found.append(path)
    return sorted(str(path.relative_to(folder)) for path in found if not path.match(PARTIAL))


def _has_finished_groups(folder: Path) -> bool:
    """Whether going on spares any work. A preparation that was refused at the first row holds none."""
    return any(path.name != PLAN for path in (folder / WORK).glob("*.json"))


def _clear(folder: Path) -> None:
    """Removes what preparing wrote, the manifest first; the lock stays."""
    (folder / FILE).unlink(missing_ok=True)
    (folder / QUARANTINE).unlink(missing_ok=True)
    for name in (FEATURES, *SPLITS):
        shutil.rmtree(folder / name, ignore_errors=True)
    for entry in (folder / WORK).iterdir():
        if entry.name != LOCK:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
