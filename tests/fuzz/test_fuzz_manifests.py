"""Whatever stands in the manifest of a checkpoint: a manifest, or one sentence."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict

from hypothesis import strategies as st

from opsd.checkpoints import manifest
from opsd.checkpoints.manifest import CheckpointError, FileEntry, Manifest
from opsd.checkpoints.sealed import seal
from tests.fakes.fuzzing import AMOUNTS, changed, encoded, fuzz, json_values, objects

FILES = (FileEntry("rank-0000.0a1b.safetensors", 7, "xxh3_128:" + "0" * 32), FileEntry("x", 0, "xxh3_128:" + "f" * 32))
GOOD = Manifest(step=20, sample=640, layout={"dp": 2}, config_digest="d", created=1.8e9, files=FILES, tier="local")
FIELDS = asdict(GOOD)
SEEDS: tuple[bytes, ...] = (
    b"[" * 100_000,
    encoded(seal({**FIELDS, "step": 10**400})),
    encoded(seal({**FIELDS, "files": [{**asdict(FILES[0]), "name": "../../etc/passwd"}]})),
    encoded({**FIELDS, "run": "\ud800"}),
    b'{"format": 1e999}',
    b'{"format": ' + b"9" * 5000 + b"}",
)


@AMOUNTS
def test_no_manifest_is_a_bug(amount: int) -> None:
    """Its checksum may be right; what is accepted names files inside its folder and can be written again."""

    def decode(content: bytes) -> None:
        try:
            read = manifest.decode(content, "manifest.json")
        except CheckpointError as error:
            assert str(error).isprintable() and len(str(error)) < 500
            return
        assert all("/" not in file.name and file.size >= 0 for file in read.files)
        again = manifest.decode(manifest.encode(read), "manifest.json")
        assert asdict(again) == {**asdict(read), "format": again.format}

    entries = st.lists(objects(asdict(FILES[0])) | json_values, max_size=3)
    sealed = objects(FIELDS) | entries.map(lambda files: {**FIELDS, "files": files})

    def attempt(content: bytes | dict[str, object]) -> None:
        if isinstance(content, dict):
            with suppress(ValueError, TypeError):
                content = seal(content)  # where it cannot be sealed it is tried as it is
            content = encoded(content)
        decode(content)

    fuzz(attempt, sealed | changed(manifest.encode(GOOD)) | json_values.map(encoded), amount, SEEDS)
