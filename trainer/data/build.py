"""Tokenising many files: in parallel and resumable.

Files are put into groups. One process tokenises a group into its own shards and, once they are durable, records the
group, which is then not repeated. The corpus exists when all groups are done::

    plan.json        what the folder is made from; a build with another plan does not resume it
    part-00007.json  the shards of a finished group

A corpus that is overwritten stays until the new one is complete in ``.overwriting`` below its folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from opsd.durable import DRAFT, Unproved, make_folder, prove, rename, replace, sync_folder
from opsd.trainer.data.shards import INDEX, TOKENIZER, DataError, Framing, Index, Shard, Tally, parse_shard, read_index
from opsd.trainer.data.texts import Reading, read_texts
from opsd.trainer.data.tokenize import commit_corpus, load_tokenizer, write_shards
from opsd.words import of_file

PLAN = "plan.json"
OVERWRITING = ".overwriting"
_SHARD = re.compile(r"shard-\d{5,}-\d{5,}\.(tokens|documents)")
GROUP_BYTES = 64 << 20

Told = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class BuildTask:
    """The parameters of the worker processes."""

    folder: Path
    reading: Reading
    framing: Framing
    shard_tokens: int
    threads: int
    group_bytes: int = GROUP_BYTES
    """Files are grouped up to this size; a larger file is a group of its own."""


def build(
    files: Sequence[Path], tokenizer: Tokenizer, job: BuildTask, workers: int, told: Told = lambda _: None
) -> Index:
    """Tokenise ``files`` into the corpus ``job.folder``; ``told`` gets the size of each finished group in bytes.

    Raises DataError if the folder was begun from other data or a file cannot be used, OSError if the folder cannot be
    written.
    """
    make_folder(job.folder)
    groups = group(files, job.group_bytes)
    _begin(job, groups, tokenizer)
    left = []
    for number, members in enumerate(groups):
        if _read_part(job.folder, number) is None:
            left.append(number)
        else:
            told(_size(members))
    if workers == 1 or len(left) <= 1:
        for number in left:
            _do(job, tokenizer, number, groups[number])
            told(_size(groups[number]))
    else:
        _do_parallel(job, groups, left, workers, told)
    shards: list[Shard] = []
    read = Tally()
    for number in range(len(groups)):
        part, tally = _read_part(job.folder, number) or ((), Tally())
        shards += part
        read.add(tally)
    try:
        index = commit_corpus(job.folder, tokenizer, job.framing, shards, read)
    except Unproved:
        forget(job.folder)
        raise
    try:
        _remove_surplus(job.folder, index)
        forget(job.folder)
    except OSError as error:
        print(f"opsd: the corpus is complete, but {of_file(error)}; remove that file", file=sys.stderr)
    return index


def group(files: Sequence[Path], group_bytes: int) -> list[list[Path]]:
    """``files`` in their order, in groups of up to ``group_bytes``."""
    groups: list[list[Path]] = []
    size = group_bytes
    for path in files:
        if size >= group_bytes:
            groups.append([])
            size = 0
        groups[-1].append(path)
        size += path.stat().st_size
    return groups


def begun(folder: Path) -> bool:
    """Whether ``folder`` contains an unfinished build."""
    return (folder / PLAN).exists()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create ``folder`` and keep other builds out of it. Raises DataError if one is running, OSError."""
    make_folder(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"another build is writing to {folder}; wait for it, or choose another folder") from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(descriptor)


def tidy(folder: Path) -> None:
    """Complete what a build that was killed at its end has left to do in ``folder``. Raises DataError, OSError."""
    if (folder / OVERWRITING / INDEX).exists():
        put_in_place(folder)
    if (folder / INDEX).exists():
        with suppress(OSError):
            _remove_surplus(folder, read_index(folder))
            forget(folder)
            (folder / OVERWRITING).rmdir()


def overwriting(folder: Path) -> Path:
    """The folder to build in, instead of ``folder`` itself; an earlier attempt is removed. Raises OSError."""
    draft = folder / OVERWRITING
    if draft.exists():
        shutil.rmtree(draft)
    if (folder / INDEX).exists():
        return draft
    forget(folder)
    return folder


def put_in_place(folder: Path) -> None:
    """Replace the corpus of ``folder`` with the complete one in ``.overwriting``. Raises DataError, OSError.

    If it is interrupted, ``tidy`` completes it.
    """
    draft = folder / OVERWRITING
    index = read_index(draft)
    (folder / INDEX).unlink(missing_ok=True)
    sync_folder(folder)
    for path in sorted(draft.iterdir()):
        if path.name != INDEX:
            rename(path, folder / path.name)
    forget(folder)
    _remove_surplus(folder, index)
    sync_folder(folder)
    rename(draft / INDEX, folder / INDEX)
    prove(folder / INDEX)
    draft.rmdir()


def _remove_surplus(folder: Path, index: Index) -> None:
    """Remove the shards of earlier builds that ``index`` does not list, and what killed builds have begun to write."""
    listed = {file.name for shard in index.shards for file in shard.files}
    for path in list(folder.iterdir()):
        is_draft = path.name.startswith(".") and path.name.endswith(DRAFT)
        if is_draft or (_SHARD.fullmatch(path.name) and path.name not in listed):
            path.unlink(missing_ok=True)


def forget(folder: Path) -> None:
    """Remove the records of a build; its shards stay."""
    errors = []
    for record in [*folder.glob("part-*.json"), folder / PLAN]:
        try:
            record.unlink(missing_ok=True)
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _begin(job: BuildTask, groups: list[list[Path]], tokenizer: Tokenizer) -> None:
    described = [[(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in members] for members in groups]
    plan = json.dumps([described, tokenizer.to_str(), asdict(job.reading), asdict(job.framing), job.shard_tokens])
    digest = hashlib.blake2b(plan.encode(), digest_size=16).hexdigest()
    path = job.folder / PLAN
    if path.exists():
        if json.loads(path.read_text(encoding="utf-8")) != {"digest": digest}:
            raise DataError(
                f"{job.folder} was begun with other files, another tokenizer or other settings; "
                "run with those again, or pass --overwrite"
            )
        return
    replace(job.folder / TOKENIZER, tokenizer.to_str(pretty=True).encode())
    _write(path, {"digest": digest})


def _do_parallel(job: BuildTask, groups: list[list[Path]], left: list[int], workers: int, told: Told) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(left)), context, _start_worker, (job,)) as pool:
        waiting: dict[Future[None], int] = {pool.submit(_do_in_worker, n, groups[n]): n for n in left}
        try:
            for done in as_completed(waiting):
                done.result()
                told(_size(groups[waiting[done]]))
        except BrokenProcessPool:
            raise DataError(
                "a process was killed, probably for want of memory; use fewer --workers, run again"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


_worker: tuple[BuildTask, Tokenizer]


def _start_worker(job: BuildTask) -> None:
    global _worker
    os.environ["RAYON_NUM_THREADS"] = str(job.threads)
    _worker = job, load_tokenizer(job.folder / TOKENIZER)


def _do_in_worker(number: int, files: list[Path]) -> None:
    job, tokenizer = _worker
    _do(job, tokenizer, number, files)


def _do(job: BuildTask, tokenizer: Tokenizer, number: int, files: list[Path]) -> None:
    tally = Tally()
    texts = read_texts(files, reading=job.reading, tally=tally)
    shards = write_shards(texts, tokenizer, job.framing, job.folder, job.shard_tokens, f"shard-{number:05d}")
    _write(_part(job.folder, number), {"shards": [asdict(shard) for shard in shards], "read": asdict(tally)})


def _read_part(folder: Path, number: int) -> tuple[tuple[Shard, ...], Tally] | None:
    """The shards of a finished group whose files exist and what they were made from, None otherwise."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        raw = json.loads(_part(folder, number).read_text(encoding="utf-8"))
        shards = tuple(parse_shard(entry) for entry in raw["shards"])
        if all((folder / file.name).stat().st_size == file.size for shard in shards for file in shard.files):
            return shards, Tally.parse(raw["read"])
    return None


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.json"


def _write(path: Path, content: object) -> None:
    replace(path, json.dumps(content).encode())


def _size(files: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def limited(files: Sequence[Path], max_bytes: int) -> Iterator[Path]:
    """The first of ``files``, up to ``max_bytes`` in all."""
    for path in files:
        max_bytes -= path.stat().st_size
        if max_bytes < 0:
            return
        yield path
