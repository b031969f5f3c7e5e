"""Choosing the checkpoint to go on from, and reading it back, whatever layout wrote it."""

from __future__ import annotations

import errno
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
import xxhash

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
from opsd.trainer import memory
from opsd.trainer.checkpoint import State, StateFile, file_layout
from opsd.trainer.config import ConfigError
from opsd.trainer.exchange import gather_held, newest_whole, plan_transfers, run_transfers
from opsd.trainer.locks import wait_for_saves
from opsd.trainer.persist import CLAIMS_S
from opsd.trainer.regions import Region
from opsd.trainer.world import World

Found = TypeVar("Found")
_BLOCK = 1 << 22
WAIT_FOR_SAVES_S = 60.0
LOOK_S = 1.0
WAIT_FOR_FENCED_S = 2.0
"""A fenced generation commits only what it was about to commit. Its locks say little: those of a dead node stay for a
minute and more on a server (NFSv4 lease)."""


class RestoreError(Exception):
    """There are or may be checkpoints, and none can be loaded; the message is one sentence with the way out."""


@dataclass(frozen=True, slots=True)
class _Damaged:
    """What was in memory of ``step`` turned out to be damaged when part of the state had been overwritten with it.

    It stays in ``folder`` as long as nothing better is found: each start is to meet it until told to begin afresh.
    """

    step: int
    folder: Path


def _patience_s() -> float:
    fence = Fence.of(os.environ)
    with suppress(ClaimError):  # not to know is to wait for what may still be saved
        if fence and fence.shuts_out_saves():
            return WAIT_FOR_FENCED_S
    return WAIT_FOR_SAVES_S


def with_retries(look: Callable[[], Found]) -> Found:
    """What ``look`` finds on the shared storage, which is tried again for CLAIMS_S while it fails. Raises OSError."""
    deadline = time.monotonic() + CLAIMS_S
    while True:
        try:
            return look()
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT) or time.monotonic() > deadline:
                raise
        time.sleep(LOOK_S)


def restore(
    root: Path,
    state: State,
    world: World,
    digest: Callable[[int], str],
    reporter: Reporter,
    *,
    remote: str = "",
    fresh: bool = False,
) -> Manifest | None:
    """Fill ``state`` from the newest checkpoint that verifies, in memory, under ``root`` or at ``remote``.

    None if there is none. All ranks call it together and load the same step: the first rank proposes, the ranks share
    the verification, a damaged checkpoint is set aside and the next older one is proposed. ``digest`` says what a state
    after so many samples belongs to. Raises ConfigError if the checkpoint belongs to something else, and RestoreError,
    unless ``fresh``, if there were checkpoints and none of them is whole, or if ``remote`` does not tell.
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
        _refuse_data_loss(root, kept, remote if fetched < 0 else "", fresh=fresh)
        return None
    folder = folder_of(root, manifest.step)
    if manifest.config_digest != digest(manifest.sample):
        raise ConfigError(
            f"{folder} was made with another model, seed, sequence length, corpus or order of the data so far; "
            "use the settings that the run was started with, or another run folder"
        )
    load(folder, manifest, state, world.rank)
    return _loaded(manifest, manifest.step, world, reporter, began)


def _refuse_data_loss(root: Path, kept: _Damaged | None, unread: str, *, fresh: bool) -> None:
    """Without a checkpoint to go on from: raises RestoreError if there was or may be one, unless ``fresh``."""
    if kept is not None:
        way_out = "it has been dropped, run again" if fresh else "pass --fresh"
        why = f"the only checkpoint, of step {kept.step} in memory, is damaged; {way_out} to begin again at step 0"
    elif fresh:
        return
    elif unread:
        place = without_user(unread)
        why = f"{root} has no checkpoint and none can be had from {place}; put it right, or pass --fresh to begin anew"
    elif any(is_there(folder, REJECTED) for _, folder in folders(root)):
        why = f"every checkpoint in {root} is damaged; bring one back, or pass --fresh to begin again at step 0"
    else:
        return
    raise RestoreError(why)


def _loaded(manifest: Manifest, durable: int, world: World, reporter: Reporter, began: float) -> Manifest:
    if world.rank == 0:
        load_s = time.monotonic() - began
        reporter.event("checkpoint_loaded", step=manifest.step, tier=manifest.tier, load_s=round(load_s, 4))
    if durable >= 0:
        reporter.checkpoint_committed(durable)
    return manifest


def _own(rank: int) -> str:
    return memory.state_path(Path(), rank).name


def _from_memory(
    state: State, world: World, digest: Callable[[int], str], newest: int, reporter: Reporter
) -> Manifest | _Damaged | None:
    """Fill ``state`` from the nodes' shared memory, if what is there is whole and no older than the ``newest`` step.

    States that are in the memory of another node than that of their rank are brought there first.
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
        reporter.event("checkpoint_rejected", step=save.step, file=_own(world.rank), why=why)
    return _Damaged(save.step, folder)


def load_memory(folder: Path, info: memory.StateInfo, state: State) -> Manifest:
    """Fill ``state`` from what this node's memory in ``folder`` holds of the save of ``info``.

    The rank's own state is verified while it is copied; each other one is verified by its rank. Raises CheckpointError
    or OSError; then ``state`` is neither what it was nor what it should be.
    """
    manifest = memory.manifest_of(list(memory.infos_of(folder, info.save)))
    own = memory.state_path(folder, info.rank)
    names, checksum = copy_file(own, state)
    if checksum != info.checksum:
        raise CheckpointError(f"{own} does not match its checksum", own.name)
    if rest := {name: region for name, region in state.items() if name not in names}:
        load(folder, manifest, rest, [entry.name for entry in manifest.files].index(own.name))
    return manifest


@torch.no_grad()
def copy_file(path: Path, state: State) -> tuple[list[str], str]:
    """Copy a file of this rank in this layout into ``state``: the names of what it holds, and its checksum.

    It is read and not mapped, because mapping the pages costs nearly as much as the copy, and hashed by another thread.
    Raises CheckpointError if it is not such a file, OSError if it cannot be read.
    """
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(1) as hashing:
        header = file.read(8)
        header += file.read(int.from_bytes(header, "little"))
        names = _names(header)
        if not state.keys() >= set(names) or file_layout({name: state[name] for name in names})[0] != header:
            raise CheckpointError(f"{path} is not the state of this rank in this layout", path.name)
        digest.update(header)
        for name in names:
            local = state[name].local
            direct = local.device.type == "cpu" and local.is_contiguous()
            target = local if direct else torch.empty(local.shape, dtype=local.dtype)
            whole = target.view(-1).view(torch.uint8).numpy().data
            for at in range(0, len(whole), _BLOCK):
                block = whole[at : at + _BLOCK]
                if file.readinto(block) != len(block):
                    raise CheckpointError(f"{path} has been cut off", path.name)
                hashing.submit(digest.update, block)
            if not direct:
                local.copy_(target)
    return names, f"xxh3_128:{digest.hexdigest()}"


def _names(header: bytes) -> list[str]:
    try:
        return [name for name in json.loads(header[8:]) if name != "__metadata__"]
    except (ValueError, TypeError):
        return []


def _fetch(root: Path, url: str, newest: int, world: World) -> int:
    """Bring a checkpoint that is later than the step ``newest`` from ``url``.

    Positive if that was done, 0 if there is none, negative if it could not be done, whether there is one or not.
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
    """The newest checkpoint that all ranks find whole.

    What one of them finds damaged is set aside; what one of them cannot read is passed over this time: that may be due
    to its node. Raises RestoreError if nothing is left but what was passed over.
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
            reporter.event("checkpoint_rejected", step=step, file=error.file, why=str(error))
            if not isinstance(error, Unreadable):
                _set_aside(folder)
        world.least(0)  # nobody looks again before it is set aside
        passed_over.add(step)


def _set_aside(folder: Path) -> None:
    try:
        reject(folder)
    except OSError as error:  # it is passed over all the same
        print(f"trainer: {folder} could not be set aside: {error.strerror}", file=sys.stderr)


def _refresh_directory(folder: Path) -> None:
    """An NFS client that looked too early may keep for a minute that there is none, unless it changes the folder."""
    if not is_there(folder):
        probe = folder / f".look.{secrets.token_hex(4)}"
        with suppress(OSError):
            probe.touch()
            probe.unlink()


def _report_incomplete(root: Path, newest: int, reporter: Reporter) -> None:
    for step, folder in folders(root):
        if step > newest and not is_there(folder) and not is_there(folder, REJECTED):
            why = f"{folder} has no {MANIFEST}: the checkpoint was never completed"
            reporter.event("checkpoint_rejected", step=step, file=MANIFEST, why=why)


@torch.no_grad()
def load(folder: Path, manifest: Manifest, state: State, rank: int = 0) -> None:
    """Fill ``state`` from the files of a checkpoint, each region from whichever files overlap it.

    This rank's own file comes first, and at an unchanged layout it is the only one read.
    Raises CheckpointError if the files do not cover the state.
    """
    missing = {name: region.local.numel() for name, region in state.items()}
    missing = {name: count for name, count in missing.items() if count}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    names = [entry.name for entry in manifest.files]
    for name in names[rank : rank + 1] + names[:rank] + names[rank + 1 :]:
        if not missing:
            break
        with StateFile(folder / name) as file:
            for tensor in missing.keys() & file.regions.keys():
                offset = file.regions[tensor]
                if (tensor, offset) in seen:  # replicas of one region count once
                    continue
                seen.add((tensor, offset))
                missing[tensor] -= _copy_overlap(file.tensor(tensor), offset, state[tensor])
        missing = {tensor: count for tensor, count in missing.items() if count}
    if missing:
        raise CheckpointError(f"{folder} does not hold all of {min(missing)}", str(min(missing)))


def _copy_overlap(stored: torch.Tensor, offset: Iterable[int], region: Region) -> int:
    """Copy what the stored region at ``offset`` and ours have in common; returns the number of elements."""
    source, target = [], []
    for theirs, their_length, ours, our_length in zip(
        offset, stored.shape, region.offset, region.local.shape, strict=True
    ):
        begin, end = max(theirs, ours), min(theirs + their_length, ours + our_length)
        if begin >= end:
            return 0
        source.append(slice(begin - theirs, end - theirs))
        target.append(slice(begin - ours, end - ours))
    part = stored[tuple(source)]
    region.local[tuple(target)].copy_(part)
    return part.numel()
