"""Data for spares from a source for which anybody on the network may answer."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import xxhash
from click.testing import CliRunner

from opsd import exitcodes
from opsd.commands.main import cli
from opsd.spares.corpus import needs_proof, proven, read_corpora, sha256_of
from opsd.spares.stage import stage
from opsd.spares.transfer import Folder, RateLimit, StageError, Storage, StorageError, Work
from tests.fakes.corpora import make_corpus
from tests.unit.test_spare_stage import Quiet

WORK = Work(RateLimit(None), parallel=2)
TOKENS = "shard-00000.tokens"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    make_corpus(tmp_path / "source", shards=1)
    return tmp_path / "source"


@pytest.fixture
def url(source: Path) -> Iterator[str]:
    """The source as a web server of another node has it."""
    pytest.importorskip("aiohttp")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(source)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def digest_of(folder: Path) -> str:
    return sha256_of(read_corpora(Folder(folder)))


def opsd(tmp_path: Path, *arguments: str, **spare: str):
    config = tmp_path / "opsd.toml"
    lines = "".join(f'{key} = "{value}"\n' for key, value in spare.items())
    config.write_text(f'[agent]\nstate_dir = "{tmp_path}/state"\n[spare]\nfolder = "{tmp_path}/nvme"\n{lines}')
    return CliRunner().invoke(cli, ["spare", "--config", str(config), *arguments])


def test_over_plain_http_the_expected_digest_is_needed(tmp_path: Path, source: Path, url: str) -> None:
    """It is that of the run's own copy; with it the data is taken, without it nothing is asked for."""
    refused = opsd(tmp_path, "stage", source=url)
    assert refused.exit_code == exitcodes.USAGE
    assert "set spare.digest" in refused.output
    printed = opsd(tmp_path, "digest", str(source)).output.strip()
    assert printed == digest_of(source)
    opsd(tmp_path, "stage", source=url, digest=printed)
    assert (tmp_path / "nvme" / TOKENS).read_bytes() == (source / TOKENS).read_bytes()


def test_another_index_than_the_runs_is_refused(tmp_path: Path, source: Path, url: str) -> None:
    """Another server answers, with other data and an index that fits it."""
    expected = digest_of(source)
    shutil.rmtree(source)
    make_corpus(source, shards=1, seed=1)
    refused = opsd(tmp_path, "stage", source=url, digest=expected)
    assert refused.exit_code == exitcodes.FAILED
    assert "are not those of spare.digest" in refused.output
    assert not (tmp_path / "nvme").exists()


class Weak(Folder):
    """Other data than its index says, which its fast checksum does not tell, as somebody can compute it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        false = b"\0" * (root / TOKENS).stat().st_size
        index = json.loads((root / "index.json").read_text())
        index["shards"][0]["token_file"]["checksum"] = f"xxh3_128:{xxhash.xxh3_128(false).hexdigest()}"
        (root / "index.json").write_text(json.dumps(index))
        (root / TOKENS).write_bytes(false)


def test_each_file_is_compared_by_a_hash_that_cannot_be_aimed_at(tmp_path: Path, source: Path) -> None:
    """The fast checksum of the shards is against damage and not against people."""
    storage: Storage = Weak(source)
    corpora = read_corpora(storage)
    stage(storage, corpora, tmp_path / "believed", WORK)
    with pytest.raises(StageError, match="does not match its checksum"):
        stage(storage, proven(corpora, sha256_of(corpora)), tmp_path / "nvme", WORK)
    assert not (tmp_path / "nvme" / TOKENS).exists()


def test_an_index_without_such_hashes_is_of_no_use(source: Path) -> None:
    """Earlier releases made it."""
    index = json.loads((source / "index.json").read_text())
    del index["shards"][0]["token_file"]["sha256"]
    (source / "index.json").write_text(json.dumps(index))
    corpora = read_corpora(Folder(source))
    with pytest.raises(StorageError, match=f"no SHA-256 of {TOKENS}; make the shards again"):
        proven(corpora, sha256_of(corpora))


def test_folders_do_not_lead_elsewhere(source: Path) -> None:
    """A server may list a folder called "..", which would lead out of the folder on this node."""

    class Rising(Folder):
        def folders(self) -> list[str]:
            return ["..", ".hidden", "web"]

    make_corpus(source / "inner/web", shards=1)
    assert [corpus.folder for corpus in read_corpora(Rising(source / "inner"))] == ["web"]


@pytest.mark.parametrize(
    ("source", "needed"),
    [
        ("http://node-17:8000", True), ("HTTP://node-17", True), ("simplecache::http://node-17", True),
        ("ftp://host/x", True), ("https://node-17", False), ("sftp://host/x", False), ("s3://bucket/x", False),
        ("/shared/http:/x", False),
    ],
)  # fmt: skip
def test_which_sources_need_proof(source: str, needed: bool) -> None:
    """Those that neither encrypt nor say who answers."""
    assert needs_proof(source) == needed
