"""The checkpoints of one run: which there are, which is the best, and which are kept."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from erase_rec.checkpoint.background import HostCopy, Writing
from erase_rec.checkpoint.plain_errors import ignore_remark
from erase_rec.checkpoint.record import CheckpointError, CheckpointFormatError, named_by, verify
from erase_rec.checkpoint.writing import PARTIAL, REPLACED, Content, point, write_and_publish
from erase_rec.distributed.beside import RanksBeside
from erase_rec.distributed.shards import Held, Shards
from erase_rec.distributed.world import World
from erase_rec.errors import UserError

LOOK_S = 1.0
"""Time between two looks, while a disk is waited for, whether the process is told to end."""
BEST_FILE = "best"
LAST_FILE = "last"

_NAME = re.compile(r"step_(\d{8,18})", re.ASCII)


class CheckpointManager:
    """The checkpoints of one run. One process saves at a time, or all ranks of a run together."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        world: World | None = None,
        *,
        in_background: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        """Opens ``folder`` (made at the first save) and changes nothing in it.

        Args:
            folder: ``runs/<id>/checkpoints``.
            keep: how many of the newest are retained besides the best; at least 1.
            world: the ranks that save; None: this process alone.
            in_background: :meth:`save` returns once it has a copy of the state, and a thread writes that.
            timeout_s: longest wait for another rank, and for the disk once the process is told to end.
        """
        assert keep >= 1
        self._folder = folder
        self._keep = keep
        self._world = world or World()
        self._timeout_s = timeout_s
        self._ranks: RanksBeside | None = None
        self._host_copy = HostCopy() if in_background else None
        self._writing: tuple[Path, Writing] | None = None
        self._published_since: list[Path] = []

    def save(self, step: int, tensors: Mapping[str, Held], state: Mapping[str, Any], *, is_best: bool) -> Path:
        """Writes and publishes the checkpoint of ``step``, then removes what is no longer retained.

        Every rank calls it; collective where ranks hold parts of tensors, and elsewhere only the first rank works.
        Synchronises the host. A checkpoint of the same step is replaced. Retention never looks at newer steps, which
        a run that was resumed from an older one may find here.

        In the background, first waits for the save before. What is published is the state at the call, whatever
        changes afterwards; that it failed is raised by whichever method is called next.

        Args:
            step: updates done so far.
            tensors: on any device; the same names on every rank.
            state: JSON's types only; the first rank's counts.
            is_best: mark it as the best so far.

        Returns:
            Where it is, or will be.

        Raises:
            UserError: the disk refuses, on any rank; the checkpoints saved before are kept.
        """
        self._end_writing(None)
        target = self._folder / f"step_{step:08d}"
        spread = self._world.size > 1 and any(isinstance(tensor, Shards) for tensor in tensors.values())
        if not (spread or self._world.is_first):
            return target
        ignore_remark()
        if spread and self._ranks is None:
            self._ranks = RanksBeside(self._world, self._timeout_s)
        ranks = self._ranks if spread else None
        if self._host_copy is None:
            with self._world.lent("checkpoint") if spread else nullcontext():
                self._write(target, Content(step, tensors, state), is_best, ranks)
            self._published_since.append(target)
        else:
            content = Content(step, self._host_copy.of(tensors), json.loads(json.dumps(state)))
            self._writing = target, Writing(partial(self._write, target, content, is_best, ranks))
        return target

    def _write(self, target: Path, content: Content, is_best: bool, ranks: RanksBeside | None) -> None:
        pointers = [self._folder / name for name in ([LAST_FILE, BEST_FILE] if is_best else [LAST_FILE])]
        try:
            write_and_publish(target, content, pointers, ranks)
        except OSError as error:
            raise UserError(
                f"cannot write checkpoint {target}: {error.strerror or error}; the checkpoints saved before are kept: "
                "free some space or make the folder writable, then resume"
            ) from error
        if self._world.is_first:
            self._remove_old(content.step)

    def published(self) -> list[Path]:
        """What was published since the last call, on the ranks that write; waits for nothing.

        Raises:
            UserError: a save in the background met a disk that refuses; the checkpoints saved before are kept.
        """
        if self._writing is not None and self._writing[1].done():
            self._end_writing(None)
        found, self._published_since = self._published_since, []
        return found

    def finish(self, timeout_s: float | None = None) -> None:
        """Waits for the save in the background, for at most ``timeout_s``.

        None: as long as it takes; but once the process is told to end, no longer than for another rank.

        Raises:
            UserError: it failed, or takes longer; the checkpoints saved before are kept.
        """
        self._end_writing(timeout_s)

    def settle(self, timeout_s: float) -> None:
        """Waits for the save in the background for at most ``timeout_s``, where a run ends for another reason.

        Raises nothing of it: what ends the run is said already. Any thread may call it.
        """
        if (writing := self._writing) is not None:
            writing[1].done(timeout_s)

    def _end_writing(self, timeout_s: float | None) -> None:
        if self._writing is None:
            return
        target, writing = self._writing
        self._writing = None
        if timeout_s is None:
            while self._world.stop.noted is None and not writing.done(LOOK_S):
                pass
            timeout_s = self._timeout_s
        if not writing.done(timeout_s):
            raise UserError(
                f"checkpoint {target} is not written after {timeout_s:g} seconds; the checkpoints saved before are "
                "kept: resume from these"
            )
        writing.check()
        self._published_since.append(target)

    def latest(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint that is whole, and a sentence on each newer one that is not.

        Reads the files of what it returns to compare their checksums.

        Raises:
            CheckpointFormatError: a checkpoint is of another format.
        """
        messages: list[str] = []
        for _, path in reversed(self._published()):
            try:
                verify(path)
            except CheckpointFormatError:
                raise
            except CheckpointError as error:
                messages.append(f"{error}; skipped")
            else:
                return path, messages
        return None, messages

    def best(self) -> Path | None:
        """The checkpoint marked as best, or None when there is none.

        Raises:
            CheckpointError: the mark names no checkpoint.
        """
        mark = self._folder / BEST_FILE
        try:
            name = mark.read_bytes()
        except FileNotFoundError:
            return None
        if _NAME.fullmatch(found := name.decode(errors="replace")) is None:
            raise CheckpointError(
                f"{mark} names no checkpoint: found {found[:80]!r}, expected step_ and digits; remove it"
            )
        path = self._folder / found
        return path if path.is_dir() else None

    def recover(self) -> None:
        """Clears what a killed save left, and restores the checkpoint that it was about to replace.

        Call it when a run is continued, before :meth:`latest`.
        """
        for path in self._folder.glob(f"*{REPLACED}"):
            target = path.with_name(path.name.removesuffix(REPLACED))
            if target.exists():
                shutil.rmtree(path)
            else:
                path.rename(target)
        for path in self._folder.glob(f"*{PARTIAL}"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def name_again(self, path: Path) -> None:
        """Lets ``last`` and ``best`` name the checkpoint at ``path`` where its save ended before they did.

        Call it when a run is continued from there: its state counts that evaluation as the best so far, and no later
        one that is worse would be marked.
        """
        for name in (LAST_FILE, BEST_FILE):
            mark = self._folder / name
            if name in named_by(path) and not (mark.exists() and mark.read_bytes() == path.name.encode()):
                point(mark, path)

    def _published(self) -> list[tuple[int, Path]]:
        """Step and folder of each published checkpoint, oldest first."""
        named = ((_NAME.fullmatch(path.name), path) for path in self._folder.glob("step_*"))
        return sorted((int(match[1]), path) for match, path in named if match)

    def _remove_old(self, step: int) -> None:
        best = self.best()
        for _, path in [entry for entry in self._published() if entry[0] <= step][: -self._keep]:
            if path != best:
                shutil.rmtree(path, ignore_errors=True)  # what stays is tried again after the next save
