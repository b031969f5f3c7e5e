"""Staging shards on a spare: whole or not at all, resumed, and from a source that anybody may play."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import pytest
import xxhash
from click.testing import CliRunner

from opsd import exitcodes
from opsd.commands.main import cli
from opsd.spares.stage import make_folder, remove, stage, verify
from opsd.spares.transfer import (
    BLOCK,
    INDEX,
    Folder,
    Progress,
    RateLimit,
    StageError,
    Storage,
    StorageError,
    Work,
    digest_of,
    needs_proof,
    open_storage,
    proven,
    read_corpora,
    sha256_of,
)
from tests.fakes.clock import until
from tests.fakes.posttrain import SHARD, make_corpus

# Staging shards on a spare: whole or not at all, resumed, at a bounded pace, and never through links.


WORK = Work(RateLimit(None), parallel=3)

TOKENS = "shard-00001.tokens"


class Source(Folder):
    """A folder that counts what is read of it, and breaks off or gives other bytes when told."""

    def __init__(self, root: Path, *, breaks_at: int = 1 << 60, damages: str = "") -> None:
        super().__init__(root)
        self.opened: list[tuple[str, int]] = []
        self._breaks_at, self._damages = breaks_at, damages

    def open(self, path: str, offset: int = 0) -> BinaryIO:
        self.opened.append((path, offset))
        file = super().open(path, offset)
        content = file.read()
        file.close()
        if path.endswith(INDEX):
            return BytesIO(content)
        if path == self._damages:
            content = bytes(len(content))
        return _Breaking(content[: self._breaks_at], broken=len(content) > self._breaks_at)

    def copied(self) -> dict[str, int]:
        """From which byte on each file was read, the indexes left out."""
        return {path: offset for path, offset in self.opened if not path.endswith(INDEX)}


class _Breaking(BytesIO):
    def __init__(self, content: bytes, broken: bool) -> None:
        super().__init__(content)
        self._broken = broken

    def read(self, size: int | None = -1) -> bytes:
        block = super().read(size)
        if not block and self._broken:
            raise ConnectionError("reset by peer")
        return block


@pytest.fixture
def source(tmp_path: Path) -> Path:
    make_corpus(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "nvme/shards"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def staged(storage: Folder, target: Path, work: Work = WORK):
    return stage(storage, read_corpora(storage), target, work)


def test_what_is_staged_is_what_the_source_has(source: Path, target: Path) -> None:
    """Byte for byte, nothing else lies there, the trainer reads it, and a second time nothing is copied."""
    done = staged(Folder(source), target)
    assert (done.size, done.compared) == (3 * (SHARD + 80) + 500, True)
    assert contents(target) == contents(source)
    again = Source(source)
    assert staged(again, target).size == 0
    assert again.copied() == {}
    shards = pytest.importorskip("opsd.trainer.data.shards")
    shards.verify(target, shards.read_index(target), content=True)


def test_a_mixture_has_a_folder_for_each_source(tmp_path: Path, target: Path) -> None:
    """They are found by their indexes; what is no corpus is left out."""
    for number, name in enumerate(("code", "web")):
        make_corpus(tmp_path / "mix" / name, shards=1, seed=number)
    (tmp_path / "mix/logs").mkdir()
    staged(Folder(tmp_path / "mix"), target)
    assert contents(target) == contents(tmp_path / "mix")


def test_any_url_of_fsspec_is_a_source(source: Path, target: Path) -> None:
    """Object storage among them."""
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.put(f"{source}/", "/bucket/web/", recursive=True)
    try:
        storage = open_storage("memory://bucket")
        stage(storage, read_corpora(storage), target, WORK)
        with pytest.raises(StorageError, match="cannot be listed: FileNotFoundError"):
            read_corpora(open_storage("memory://bucket/web/none"))
    finally:
        memory.rm("/bucket", recursive=True)
    assert contents(target / "web") == contents(source)


def test_a_peer_is_a_source(source: Path, target: Path) -> None:
    """Another node gives what it has through the simplest of web servers, also the rest of a copy that was cut off."""
    pytest.importorskip("aiohttp")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(source)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        storage = open_storage(f"http://127.0.0.1:{server.server_port}")
        make_folder(target)
        (target / f".{TOKENS}.part").write_bytes((source / TOKENS).read_bytes()[:15_000])
        stage(storage, read_corpora(storage), target, WORK)
    finally:
        server.shutdown()
        server.server_close()
    assert contents(target) == contents(source)


class Quiet(SimpleHTTPRequestHandler):
    """Says nothing."""

    def log_message(self, *_: object) -> None: ...


def test_an_interrupted_copy_goes_on_where_it_was_cut_off(source: Path, target: Path) -> None:
    """No index appears before all is there, and no byte is fetched twice."""
    with pytest.raises(StorageError, match=r"could not be read on: ConnectionError: reset by peer"):
        staged(Source(source, breaks_at=10_000), target, Work(RateLimit(None), parallel=1))
    assert not (target / INDEX).exists()
    begun = {path.name: path.stat().st_size for path in target.glob(".shard-*.tokens.part")}
    assert 10_000 in begun.values()
    again = Source(source)
    staged(again, target)
    assert contents(target) == contents(source)
    assert {f".{name}.part": offset for name, offset in again.copied().items() if offset} == begun


@pytest.mark.parametrize("rubbish", [b"x" * 100, b"y" * (SHARD + 1), bytes(SHARD)])
def test_a_part_that_is_wrong_is_begun_again(source: Path, target: Path, rubbish: bytes) -> None:
    """Whatever an earlier attempt, or a disk, has left there."""
    make_folder(target)
    (target / f".{TOKENS}.part").write_bytes(rubbish)
    (target / "shard-00000.tokens").write_bytes(rubbish)
    staged(Folder(source), target)
    assert contents(target) == contents(source)


def test_a_damaged_source_is_named_and_nothing_is_published(source: Path, target: Path) -> None:
    """The other files are kept for the next attempt."""
    with pytest.raises(StageError, match=rf"{TOKENS} does not match its checksum"):
        staged(Source(source, damages=TOKENS), target, Work(RateLimit(None), parallel=1))
    assert (target / INDEX).exists() == (target / TOKENS).exists() == False  # noqa: E712


def test_other_data_of_the_same_size_replaces_the_old(source: Path, target: Path) -> None:
    """Names and sizes agree, contents do not: the new index decides, and other files of it are not copied again."""
    staged(Folder(source), target)
    (target / "shard-00000.documents").unlink()
    make_corpus(source, seed=1)
    fetched = Source(source)
    assert staged(fetched, target).compared
    assert contents(target) == contents(source)


def test_verify_finds_what_has_changed_since(source: Path, target: Path) -> None:
    """A flipped bit, a lost file, a short one; the damaged copy is removed, and staging brings all of them again."""
    staged(Folder(source), target)
    corpora = read_corpora(Folder(source))
    assert verify(corpora, target, WORK) == []
    content = bytearray((target / TOKENS).read_bytes())
    content[77] ^= 1
    (target / TOKENS).write_bytes(content)
    (target / "tokenizer.json").unlink()
    os.truncate(target / "shard-00000.tokens", 5)
    bad = verify(corpora, target, WORK)
    assert [sentence.partition("/nvme/shards/")[2] for sentence in bad] == [
        f"shard-00000.tokens has 5 bytes instead of {SHARD}",
        f"{TOKENS} was damaged and has been removed",
        "tokenizer.json is missing",
    ]
    assert not (target / TOKENS).exists()
    again = staged(Folder(source), target)
    assert (again.compared, contents(target)) == (False, contents(source))
    assert digest_of(read_corpora(Folder(target))) == digest_of(corpora)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_is_read_only_is_one_sentence(source: Path, target: Path) -> None:
    """For staging, for removing, and for what verify would remove."""
    staged(Folder(source), target)
    (target / TOKENS).write_bytes(bytes(SHARD))
    corpora = read_corpora(Folder(source))
    subprocess.run(["mount", "--bind", target, target], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", target], check=True)
        (bad,) = verify(corpora, target, WORK)
        assert "cannot be read or removed: Read-only file system" in bad
        with pytest.raises(StageError, match="cannot be written: Read-only file system"):
            remove(target)
        make_corpus(source, seed=1)
        with pytest.raises(StageError, match="cannot be written: Read-only file system"):
            staged(Folder(source), target)
    finally:
        subprocess.run(["umount", target], check=True)


def test_what_was_staged_can_be_removed(source: Path, target: Path) -> None:
    """Only what the index names; somebody's notes stay."""
    staged(Folder(source), target)
    (target / "notes").write_text("mine")
    assert remove(target) == 3 * (SHARD + 80) + 500
    assert list(contents(target)) == ["notes"]


def test_what_an_interrupted_staging_has_left_can_be_removed(source: Path, target: Path) -> None:
    """Whole files and begun ones, the first time and over older data; without anything staged nothing is removed."""
    for seed in (0, 1):
        make_corpus(source, seed=seed)
        with pytest.raises(StorageError, match="could not be read on"):
            staged(Source(source, breaks_at=10_000), target, Work(RateLimit(None), parallel=1))
        (target / "notes").write_text("mine")
        assert remove(target) > 10_000
        assert list(contents(target)) == ["notes"]
        assert remove(target) == 0


def test_a_disk_that_is_too_small_is_found_before_anything_is_copied(source: Path, target: Path) -> None:
    """The sentence has both sizes."""
    index = json.loads((source / INDEX).read_text())
    index["shards"][0]["token_file"]["size"] = 10**18
    (source / INDEX).write_text(json.dumps(index))
    fetched = Source(source)
    with pytest.raises(StageError, match=r"has room for [\d.]+ [kMG]?B and 1e\+06 TB are missing"):
        staged(fetched, target)
    assert fetched.copied() == {}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": 2}, "has format 2"),
        ({"tokenizer": {"name": "../../etc/passwd", "size": 1, "checksum": "x"}}, "names files outside its folder"),
        ({"tokenizer": {"name": ".ssh", "size": 1, "checksum": "x"}}, "names files outside its folder"),
        ({"shards": 7}, "is not an index of token shards"),
    ],
)
def test_an_index_that_cannot_be_used_is_refused(source: Path, change: dict[str, object], why: str) -> None:
    """In one sentence, before anything is written."""
    index = json.loads((source / INDEX).read_text())
    (source / INDEX).write_text(json.dumps({**index, **change}))
    with pytest.raises(StorageError, match=why):
        read_corpora(Folder(source))


def test_nothing_is_written_through_links_or_into_open_folders(source: Path, target: Path, tmp_path: Path) -> None:
    """Somebody who can write there could lead root elsewhere."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    make_folder(target)
    (target / f".{TOKENS}.part").symlink_to(victim)
    with pytest.raises(StageError, match=r"tokens cannot be written"):
        staged(Folder(source), target)
    assert victim.read_text() == "precious"
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(StageError, match="is a link"):
        staged(Folder(source), tmp_path / "link")
    target.chmod(0o777)
    with pytest.raises(StageError, match="can be changed by other users"):
        staged(Folder(source), target)


def test_the_pace_is_kept_by_all_threads_together() -> None:
    """Bytes over rate, but for what was saved up."""
    now, waits = [100.0], list[float]()
    rate_limit = RateLimit(1000.0, clock=lambda: now[0], wait=waits.append)
    for _ in range(4):
        rate_limit(500)
    assert waits == [0.5, 1.0, 1.5, 2.0]
    now[0] = 200.0
    waits.clear()
    rate_limit(500)
    assert waits == []


def test_progress_is_shown_and_ends_at_the_total(source: Path, target: Path) -> None:
    """What was there already when a file was begun counts as well."""
    seen: list[tuple[int, int]] = []
    staged(Folder(source), target, Work(RateLimit(None), look=lambda p: seen.append((p.done, p.total))))
    assert seen[-1] == (3 * (SHARD + 80) + 500,) * 2
    assert Progress(10).done == 0


@pytest.mark.slow
def test_a_killed_staging_is_resumed(tmp_path: Path) -> None:
    """SIGKILL in the middle of files of several blocks, and a second staging at the same time is refused."""
    source, target = tmp_path / "source", tmp_path / "target"
    make_corpus(source, shards=1)
    big = source / "shard-00000.tokens"
    with open(big, "wb") as file:
        file.truncate(5 * BLOCK)
    from opsd.checkpoints.manifest import checksum

    index = json.loads((source / INDEX).read_text())
    index["shards"][0]["token_file"].update(size=5 * BLOCK, checksum=checksum(big))
    (source / INDEX).write_text(json.dumps(index))
    options = [f"--set=spare.source={source}", f"--set=spare.folder={target}", f"--set=agent.state_dir={tmp_path}/s"]
    command = [sys.executable, "-m", "opsd", "spare", *options, "stage", "--rate=8"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        part = target / ".shard-00000.tokens.part"
        until(lambda: part.exists() and part.stat().st_size >= 2 * BLOCK)
        with pytest.raises(StageError, match="another `opsd spare stage`"):
            staged(Folder(source), target)
        first.send_signal(signal.SIGKILL)
    kept = part.stat().st_size
    assert 2 * BLOCK <= kept < 5 * BLOCK
    again = Source(source)
    staged(again, target)
    assert again.copied()["shard-00000.tokens"] == kept
    assert contents(target) == contents(source)


def test_what_could_not_be_synced_is_copied_again(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux drops what it could not write, and reads it from memory until then: it would be found whole."""
    failed = []

    def fsync(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        if name.endswith(".part") and TOKENS in name and not failed:
            failed.append(name)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    real = os.fsync
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StageError, match="Input/output error"):
        stage(Folder(source), read_corpora(Folder(source)), target, WORK)
    again = Source(source)
    stage(again, read_corpora(again), target, WORK)
    assert again.copied()[TOKENS] == 0
    assert contents(target) == contents(source)


# Data for spares from a source for which anybody on the network may answer.


PROVED_WORK = Work(RateLimit(None), parallel=2)

PROVED_TOKENS = "shard-00000.tokens"


@pytest.fixture
def web_source(tmp_path: Path) -> Path:
    make_corpus(tmp_path / "web_source", shards=1)
    return tmp_path / "web_source"


@pytest.fixture
def url(web_source: Path) -> Iterator[str]:
    """The source as a web server of another node has it."""
    pytest.importorskip("aiohttp")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(web_source)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def shown_digest(folder: Path) -> str:
    return sha256_of(read_corpora(Folder(folder)))


def opsd(tmp_path: Path, *arguments: str, **spare: str):
    config = tmp_path / "opsd.toml"
    lines = "".join(f'{key} = "{value}"\n' for key, value in spare.items())
    config.write_text(f'[agent]\nstate_dir = "{tmp_path}/state"\n[spare]\nfolder = "{tmp_path}/nvme"\n{lines}')
    return CliRunner().invoke(cli, ["spare", "--config", str(config), *arguments])


def test_over_plain_http_the_expected_digest_is_needed(tmp_path: Path, web_source: Path, url: str) -> None:
    """It is that of the run's own copy; with it the data is taken, without it nothing is asked for."""
    refused = opsd(tmp_path, "stage", source=url)
    assert refused.exit_code == exitcodes.USAGE
    assert "set spare.digest" in refused.output
    printed = opsd(tmp_path, "digest", str(web_source)).output.strip()
    assert printed == shown_digest(web_source)
    opsd(tmp_path, "stage", source=url, digest=printed)
    assert (tmp_path / "nvme" / PROVED_TOKENS).read_bytes() == (web_source / PROVED_TOKENS).read_bytes()


def test_another_index_than_the_runs_is_refused(tmp_path: Path, web_source: Path, url: str) -> None:
    """Another server answers, with other data and an index that fits it."""
    expected = shown_digest(web_source)
    shutil.rmtree(web_source)
    make_corpus(web_source, shards=1, seed=1)
    refused = opsd(tmp_path, "stage", source=url, digest=expected)
    assert refused.exit_code == exitcodes.FAILED
    assert "are not those of spare.digest" in refused.output
    assert not (tmp_path / "nvme").exists()


class Weak(Folder):
    """Other data than its index says, which its fast checksum does not tell, as somebody can compute it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        false = b"\0" * (root / PROVED_TOKENS).stat().st_size
        index = json.loads((root / "index.json").read_text())
        index["shards"][0]["token_file"]["checksum"] = f"xxh3_128:{xxhash.xxh3_128(false).hexdigest()}"
        (root / "index.json").write_text(json.dumps(index))
        (root / PROVED_TOKENS).write_bytes(false)


def test_each_file_is_compared_by_a_hash_that_cannot_be_aimed_at(tmp_path: Path, web_source: Path) -> None:
    """The fast checksum of the shards is against damage and not against people."""
    storage: Storage = Weak(web_source)
    corpora = read_corpora(storage)
    stage(storage, corpora, tmp_path / "believed", PROVED_WORK)
    with pytest.raises(StageError, match="does not match its checksum"):
        stage(storage, proven(corpora, sha256_of(corpora)), tmp_path / "nvme", PROVED_WORK)
    assert not (tmp_path / "nvme" / PROVED_TOKENS).exists()


def test_an_index_without_such_hashes_is_of_no_use(web_source: Path) -> None:
    """Earlier releases made it."""
    index = json.loads((web_source / "index.json").read_text())
    del index["shards"][0]["token_file"]["sha256"]
    (web_source / "index.json").write_text(json.dumps(index))
    corpora = read_corpora(Folder(web_source))
    with pytest.raises(StorageError, match=f"no SHA-256 of {PROVED_TOKENS}; make the shards again"):
        proven(corpora, sha256_of(corpora))


def test_folders_do_not_lead_elsewhere(web_source: Path) -> None:
    """A server may list a folder called "..", which would lead out of the folder on this node."""

    class Rising(Folder):
        def folders(self) -> list[str]:
            return ["..", ".hidden", "web"]

    make_corpus(web_source / "inner/web", shards=1)
    assert [corpus.folder for corpus in read_corpora(Rising(web_source / "inner"))] == ["web"]


@pytest.mark.parametrize(
    ("web_source", "needed"),
    [
        ("http://node-17:8000", True), ("HTTP://node-17", True), ("simplecache::http://node-17", True),
        ("ftp://host/x", True), ("https://node-17", False), ("sftp://host/x", False), ("s3://bucket/x", False),
        ("/shared/http:/x", False),
    ],
)  # fmt: skip
def test_which_sources_need_proof(web_source: str, needed: bool) -> None:
    """Those that neither encrypt nor say who answers."""
    assert needs_proof(web_source) == needed
