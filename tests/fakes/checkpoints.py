"""Small checkpoints, and damage to them."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from opsd.checkpoints import manifest
from opsd.checkpoints.manifest import MANIFEST, FileEntry, Manifest
from opsd.checkpoints.sealed import seal
from opsd.commands.checkpoint import checkpoint


def make(root: Path, step: int, *, files: int = 2) -> Path:
    folder = manifest.folder_of(root, step)
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for rank in range(files):
        path = folder / f"rank-{rank:04d}.safetensors"
        path.write_bytes(f"{step} {rank} ".encode() * 50)
        entries.append(FileEntry(path.name, path.stat().st_size, manifest.checksum(path)))
    manifest.commit(folder, Manifest(step, step * 4, {"dp": files}, "digest", tuple(entries), "local", 1.7e9, "run"))
    return folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)


def swap_for_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def edit(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / MANIFEST).read_text())
    del raw["checksum"]
    (folder / MANIFEST).write_text(json.dumps(seal(raw | changes)))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(checkpoint, [str(a) for a in arguments], standalone_mode=False)
