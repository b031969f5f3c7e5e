"""Choosing the checkpoint to resume from."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from opsd.checkpoints.claims import ClaimError, Fence
from opsd.checkpoints.manifest import (
    MANIFEST,
    REJECTED,
    CheckpointError,
    Manifest,
    Unreadable,
    folder_of,
    folders,
    is_there,
    reject,
    steps,
    verify,
)
from opsd.checkpoints.manifest import newest as newest_step
from opsd.checkpoints.remote import URL, without_user
from opsd.client import Reporter
from opsd.events import CheckpointLoaded, CheckpointRejected
from opsd.jsonl import new_lines
from opsd.trainer import memory
from opsd.trainer.checkpoint import State
from opsd.trainer.config import ConfigError
from opsd.trainer.exchange import gather_held, newest_whole, plan_transfers, run_transfers
from opsd.trainer.load import load, load_memory
from opsd.trainer.locks import wait_for_saves
from opsd.trainer.parts import with_retries
from opsd.trainer.world import World

EVENTS = "events.jsonl"
WAIT_FOR_SAVES_S = 60.0
WAIT_FOR_FENCED_S = 2.0
"""A fenced generation only commits what it was about to commit.

Its locks say little: a server keeps those of a dead node for a minute or more (NFSv4 lease).
"""


class RestoreError(Exception):
    """Checkpoints exist or may exist, and none can be loaded; the message is one sentence with the remedy."""


@dataclass(frozen=True, slots=True)
class _Damaged:
    """The state of ``step`` in memory was found damaged after part of the rank's state had been overwritten with it.

    It stays in ``folder`` until something better is found, so that each start meets it until one has ``--fresh``.
    """

    step: int
    folder: Path


def _patience_s() -> float:
    fence = Fence.of(os.environ)
    with suppress(ClaimError):  # not to know is to wait for what may still be saved
        if fence and fence.shuts_out_saves():
            return WAIT_FOR_FENCED_S
    return WAIT_FOR_SAVES_S


def restore(
    root: Path,
    state: State,
    world: World,
    digest: Callable[[int], str],
    reporter: Reporter,
    *,
    remote: str = "",
    fresh: bool = False,
    changes: Callable[[], list[str] | None] = lambda: None,
) -> Manifest | None:
    """Fill ``state`` from the newest valid checkpoint, in memory, under ``root`` or at ``remote``.

    None if there is none. All ranks call it together and load the same step: the first rank proposes, the ranks share
    the verification, and a damaged checkpoint is set aside in favour of the next older one. ``digest`` identifies model
    and data after a number of samples; if it differs, ``changes`` names settings. Raises ConfigError if the checkpoint
    is of another model or data. Raises RestoreError, unless ``fresh``, if there were checkpoints, also by the
    run's events, and none of them is valid. The same goes for a ``remote`` that cannot be read.
    """
    began = time.monotonic()
    if world.rank == 0:
        wait_for_saves(root, _patience_s())
    found = with_retries(lambda: newest_step(root)) if world.rank == 0 else None
    newest = world.from_first(-1 if found is None else found)
    kept = _from_memory(state, world, digest, newest, reporter)
    if isinstance(kept, Manifest):
        return _loaded(kept, newest, world, reporter, began)
    manifest = _choose(root, world, reporter)
    fetched = _fetch(root, remote, -1 if manifest is None else manifest.step, world) if remote else 0
    if fetched > 0:
        manifest = _choose(root, world, reporter)
    if world.rank == 0:
        _report_incomplete(root, -1 if manifest is None else manifest.step, reporter)
    if kept is not None and (manifest is not None or fresh):
        memory.forget(kept.folder, world.rank)
    if manifest is None:
        gone = world.from_first(_last_told(root.parent / EVENTS) if world.rank == 0 else -1)
        _refuse_data_loss(root, kept, remote if fetched < 0 else "", gone, fresh=fresh)
        return None
    folder = folder_of(root, manifest.step)
    if manifest.config_digest != digest(manifest.sample):
        raise ConfigError(
            f"{folder} was made with {_difference(changes())}; "
            "use the settings that the run was started with, or another run folder"
        )
    load(folder, manifest, state, world.rank)
    return _loaded(manifest, manifest.step, world, reporter, began)


def _difference(changed: list[str] | None) -> str:
    if changed is None:
        return "another model, seed, optimizer, sequence length, corpus or order of the data so far"
    return f"other settings: {'; '.join(changed)}" if changed else "another corpus or order of the data so far"


def _last_told(events: Path) -> int:
    """The newest step whose checkpoint the run has told to be durable, -1 without any."""
    told = set[int]()
    for line in new_lines(events, {}):
        match line:
            case {"event": "checkpoint_committed", "step": int(step)}:
                told.add(step)
            case {"event": "checkpoint_unproved", "step": int(step)}:
                told.discard(step)
    return max(told, default=-1)


def _refuse_data_loss(root: Path, kept: _Damaged | None, unread: str, gone: int, *, fresh: bool) -> None:
    """Without a checkpoint: raises RestoreError if there was or may be one, unless ``fresh``."""
    if kept is not None:
        way_out = "it has been dropped, run again" if fresh else "pass --fresh"
        why = f"the only checkpoint, of step {kept.step} in memory, is damaged; {way_out} to begin again at step 0"
    elif fresh:
        return
    elif unread:
        place = without_user(unread)
        why = f"{root} has no checkpoint and none is available from {place}; fix that, or start over with --fresh"
    elif any(is_there(folder, REJECTED) for _, folder in folders(root)):
        why = f"every checkpoint in {root} is damaged; bring one back, or pass --fresh to begin again at step 0"
    elif gone >= 0:
        why = f"{root} has no checkpoint, but this run saved step {gone}; bring it back, or start over with --fresh"
    else:
        return
    raise RestoreError(why)


def _loaded(manifest: Manifest, durable: int, world: World, reporter: Reporter, began: float) -> Manifest:
    if world.rank == 0:
        load_s = time.monotonic() - began
        fields = CheckpointLoaded(step=manifest.step, tier=manifest.tier, load_s=round(load_s, 4))
        reporter.event("checkpoint_loaded", **fields)
    if durable >= 0:
        reporter.checkpoint_committed(durable)
    return manifest


def _own(rank: int) -> str:
    return memory.state_path(Path(), rank).name


def _from_memory(
    state: State, world: World, digest: Callable[[int], str], newest: int, reporter: Reporter
) -> Manifest | _Damaged | None:
    """Fill ``state`` from the nodes' shared memory, if a complete save there is not older than the ``newest`` step.

    States in another node's memory than their rank's are transferred first.
    """
    folder = reporter.path.parent if reporter.path else None

    def usable(info: memory.StateInfo) -> bool:
        return info.step >= newest and info.layout == world.layout and info.digest == digest(info.sample)

    held = gather_held(folder, world, usable)
    save = newest_whole(held, world.size)
    if save is None or world.least(folder is not None) == 0:
        return None
    assert folder is not None
    planned = list(plan_transfers(held, world.local_size, world.size, save))
    run_transfers(planned, folder, world)
    why = ""
    try:
        info = memory.read_info(folder, world.rank)
        if info is None or info.save != save.number:
            raise CheckpointError("it could not be brought here", _own(world.rank))
        manifest = load_memory(folder, info, state)
    except (CheckpointError, OSError) as error:
        why = str(error)
    if world.least(not why) == 1:
        return replace(manifest, tier=memory.PARTNER) if planned else manifest
    if why:
        reporter.event("checkpoint_rejected", **CheckpointRejected(step=save.step, file=_own(world.rank), why=why))
    return _Damaged(save.step, folder)


def _fetch(root: Path, url: str, newest: int, world: World) -> int:
    """Download a checkpoint later than the step ``newest`` from ``url``.

    Positive if that was done, 0 if there is none, negative if it failed, whether there is one or not.
    """
    command = [sys.executable, "-m", "opsd.checkpoints.remote", "fetch", str(root), str(newest)]
    fetching: subprocess.Popen[bytes] | None = None
    if world.rank == 0:
        environment = os.environ | {URL: url}
        fetching = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)

    def fetched() -> int | None:
        if fetching is None or fetching.poll() is None:
            return None
        printed, _ = fetching.communicate()
        return -1 if fetching.returncode else len(printed)

    return world.once_first_has(fetched)


def _choose(root: Path, world: World, reporter: Reporter) -> Manifest | None:
    """The newest checkpoint that all ranks find valid.

    One that a rank finds damaged is set aside. One that a rank cannot read is skipped this time, since that may be the
    node's fault. Raises RestoreError if only skipped ones remain.
    """
    passed_over: set[int] = set()
    while True:
        found = set(with_retries(lambda: steps(root))) if world.rank == 0 else set()
        step = world.from_first(max(found - passed_over, default=-2 if found else -1))
        if step == -2:
            raise RestoreError(f"not every rank can read the checkpoints in {root}; see the events checkpoint_rejected")
        if step == -1:
            return None
        folder = folder_of(root, step)
        _refresh_directory(folder)
        error: CheckpointError | None = None
        try:
            manifest = verify(folder, part=world.rank, parts=world.size)
        except CheckpointError as damage:
            error = damage
        finder = world.least(world.size if error is None else world.rank)
        if finder == world.size:
            return manifest
        if world.rank == finder and error is not None:
            fields = CheckpointRejected(step=step, file=error.file, why=str(error))
            reporter.event("checkpoint_rejected", **fields)
            if not isinstance(error, Unreadable):
                _set_aside(folder)
        world.least(0)  # no rank looks again before it is set aside
        passed_over.add(step)


def _set_aside(folder: Path) -> None:
    try:
        reject(folder)
    except OSError as error:  # it is passed over all the same
        print(f"opsd: {folder} could not be set aside: {error.strerror}", file=sys.stderr)


def _refresh_directory(folder: Path) -> None:
    """Make an NFS client see a new manifest: it may cache its absence for a minute, unless it changes the folder."""
    if not is_there(folder):
        probe = folder / f".look.{secrets.token_hex(4)}"
        with suppress(OSError):
            probe.touch()
            probe.unlink()


def _report_incomplete(root: Path, newest: int, reporter: Reporter) -> None:
    for step, folder in folders(root):
        if step > newest and not is_there(folder) and not is_there(folder, REJECTED):
            why = f"{folder} has no {MANIFEST}: the checkpoint was never completed"
            reporter.event("checkpoint_rejected", **CheckpointRejected(step=step, file=MANIFEST, why=why))
