"""The folder of a run: where each of its files is, and how a new one gets its name."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from os.path import exists, isfile  # Path's own raise where a name is too long
from pathlib import Path
from typing import Self

from erase_rec.checkpoint import CheckpointManager
from erase_rec.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RunFolder:
    """``runs/<id>/``: ``config.yaml``, ``environment.json``, ``features/``, ``checkpoints/``, logs, and results."""

    def __init__(self, path: Path) -> None:
        """Wraps an existing folder."""
        self.path = path

    @classmethod
    def choose(cls, parent: Path, name: str | None, *, config_name: str, config_hash: str) -> RunFolder:
        """Where a new run will write; :meth:`made` makes it, so that a mistake in between leaves no folder behind.

        Args:
            parent: ``run.dir``.
            name: ``run.name``; None: configuration name, its hash, and the start time in UTC.
            config_name: stem of the configuration's file.
            config_hash: hash of the resolved configuration.

        Raises:
            UserError: the name is a path, or the folder exists.
        """
        if name is not None and (Path(name).name != name or name == ".."):
            raise UserError(f"run.name: expected the name of a folder, found {name!r}; say where in run.dir")
        parent = Path(os.path.expanduser(parent))
        run_id = name or f"{config_name}-{config_hash[:8]}-{datetime.now(UTC):%Y%m%dT%H%M%S}"
        path = parent / run_id
        attempt = 2
        while name is None and exists(path):
            path = parent / f"{run_id}-{attempt}"
            attempt += 1
        if exists(path):
            raise cls._exists(path)
        return cls(path)

    @contextmanager
    def made(self) -> Iterator[Self]:
        """Makes the chosen folder: what the block writes into the one given appears there as a whole, at its end.

        So every folder of a run can be resumed: a kill in the block leaves the name free, and a hidden ``.partial``.

        Raises:
            UserError: it exists by now, or cannot be made.
        """
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        try:
            partial.mkdir(parents=True)
        except (OSError, ValueError) as error:  # a NUL is a ValueError
            why = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"run.dir: cannot make {self.path}: {why}; choose another run.dir or run.name") from error
        try:
            yield type(self)(partial)
            try:
                partial.rename(self.path)
            except OSError as error:
                if not self.path.exists():
                    raise UserError(f"run.dir: cannot make {self.path}: {error.strerror}") from error
                raise self._exists(self.path) from None
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A block that writes into the folder.

        Raises:
            UserError: the disk is full, or the user's share of it.
        """
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise
            where = error.filename or self.path
            raise UserError(
                f"cannot write {where}: {error.strerror}; the checkpoints saved before are kept: free some space, then "
                f"go on with --resume {self.path}"
            ) from error

    @staticmethod
    def _exists(path: Path) -> UserError:
        return UserError(
            f"run.name: {path} exists; resume it with --resume {path}, choose another run.name or remove it"
        )

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Opens the folder of an earlier run.

        Raises:
            UserError: it is not one.
        """
        folder = cls(path)
        if not isfile(folder.config):
            raise UserError(f"{path} is not a run folder: it holds no {folder.config.name}")
        return folder

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> RunFolder:
        """The run that a checkpoint (or a run folder, or its ``checkpoints`` folder) belongs to.

        Raises:
            UserError: no run folder is at or above it.
        """
        for candidate in (checkpoint, checkpoint.parent, checkpoint.parent.parent):
            if isfile(cls(candidate).config):
                return cls(candidate)
        raise UserError(f"{checkpoint} is neither a run folder nor a checkpoint inside one")

    @property
    def config(self) -> Path:
        """The resolved configuration. Its presence makes the folder a run that can be resumed."""
        return self.path / "config.yaml"

    def write_config(self, text: str) -> None:
        """Writes :attr:`config`; a kill leaves the old one or the new one."""
        partial = self.path / f"{self.config.name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.config)

    @property
    def environment(self) -> Path:
        """Versions, commit, command and data fingerprint."""
        return self.path / "environment.json"

    @property
    def features(self) -> Path:
        """Fitted transforms and vocabularies."""
        return self.path / "features"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints, one folder each."""
        return self.path / "checkpoints"

    def checkpoint(self, wanted: Path) -> Path:
        """The checkpoint that ``wanted`` means: itself, or for a run folder the best one, else the newest.

        Raises:
            UserError: the run has no whole checkpoint, or none of that name.
        """
        if wanted.resolve().parent == self.checkpoints.resolve():
            if not wanted.is_dir():
                there = ", ".join(sorted(path.name for path in self.checkpoints.glob("step_*"))) or "none"
                raise UserError(f"{wanted}: the run has no such checkpoint; there are: {there}")
            return wanted
        manager = CheckpointManager(self.checkpoints, keep=1)
        found = manager.best() or manager.latest()[0]
        if found is None:
            raise UserError(f"{self.path} holds no checkpoint that is whole")
        return found

    @property
    def autotune(self) -> Path:
        """What ``schedule.autotune`` measured and chose."""
        return self.path / "autotune.json"

    @property
    def sharding_plan(self) -> Path:
        """Which rank held what of each table, where tables were spread; of the newest start."""
        return self.path / "sharding_plan.json"

    @property
    def warm_start(self) -> Path:
        """What ``train.init_from`` took from which checkpoint, tensor by tensor."""
        return self.path / "warm_start.json"

    @property
    def scores(self) -> Path:
        """Label and predictions of each held-out row, where ``eval.scores`` asks for them."""
        return self.path / "scores.parquet"

    def write_environment(self, entries: dict[str, str]) -> None:
        """Writes :attr:`environment`."""
        self.environment.write_text(json.dumps(entries, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def read_environment(self) -> dict[str, str]:
        """Reads :attr:`environment`.

        Raises:
            UserError: it is not as a run leaves it.
        """
        try:
            entries = json.loads(self.environment.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{self.environment}: cannot be read ({error}); copy the run folder again") from error
        if not isinstance(entries, dict) or not all(isinstance(value, str) for value in entries.values()):
            raise UserError(f"{self.environment}: expected texts by name; copy the run folder again")
        return entries
