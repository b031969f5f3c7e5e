"""Checkpoints as files: commit, verify, set aside, prune, and manifests that are none."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from opsd import exitcodes
from opsd.checkpoints import manifest, remote
from opsd.checkpoints.manifest import MANIFEST, REJECTED, CheckpointError, FileEntry, Manifest, Unreadable, folder_of
from opsd.checkpoints.retention import PRUNED, prune
from opsd.checkpoints.sealed import seal
from tests.fakes.checkpoints import edit, flip, make, run, swap_for_folder

# Checkpoints as files: commit, verify, set aside, prune, and the command that shows them.


def test_a_commit_is_read_back(tmp_path: Path) -> None:
    """What is committed is read back equal, verifies, and leaves no draft behind."""
    folder = make(tmp_path, 20)
    read = manifest.verify(folder)
    assert (read.step, read.sample, read.layout, read.run) == (20, 80, {"dp": 2}, "run")
    assert manifest.read(folder) == read
    assert sorted(path.name for path in folder.iterdir()) == [
        MANIFEST, "rank-0000.safetensors", "rank-0001.safetensors",
    ]  # fmt: skip


def test_a_checkpoint_exists_with_its_manifest(tmp_path: Path) -> None:
    """Folders without a manifest and other files are not checkpoints; a missing root has none."""
    assert manifest.steps(tmp_path / "none") == []
    for step in (40, 20):
        make(tmp_path, step)
    (make(tmp_path, 60) / MANIFEST).unlink()
    (tmp_path / "notes").mkdir()
    assert manifest.steps(tmp_path) == [20, 40]


def test_a_commit_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """When the manifest cannot be put in place the checkpoint does not exist and no draft stays."""
    folder = make(tmp_path, 20)
    entry = manifest.read(folder)
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()  # a rename of a file onto a folder fails
    with pytest.raises(OSError):
        manifest.commit(folder, entry)
    assert not any(path.name.startswith(".") for path in folder.iterdir())


COMMIT = """
import sys
from pathlib import Path

from opsd.checkpoints import manifest
from opsd.durable import Unproved

folder = Path(sys.argv[1])
try:
    manifest.commit(folder, manifest.read(folder, manifest.REJECTED))
except Unproved as error:
    sys.exit(error.filename)
"""


def test_a_commit_that_may_not_be_durable_is_not_undone(tmp_path: Path) -> None:
    """If the folders cannot be synced once the manifest is in place, the checkpoint exists, since others may use it."""
    folder = make(tmp_path / "checkpoints", 20)
    manifest.reject(folder)
    # A folder that may not be listed cannot be synced; root needs to drop the right to do so nevertheless.
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    folder.parent.chmod(0o300)
    try:
        done = subprocess.run(
            [*drop, sys.executable, "-c", COMMIT, folder], capture_output=True, text=True, timeout=60, check=False
        )
    finally:
        folder.parent.chmod(0o700)
    assert done.stderr == f"{folder}\n"
    assert manifest.steps(folder.parent) == [20]
    manifest.prove(folder)
    manifest.verify(folder)
    assert not any(path.name.startswith(".") for path in folder.iterdir())


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "bit": (lambda f: flip(f / "rank-0001.safetensors"), "rank-0001.safetensors", "does not match its checksum"),
    "short": (lambda f: os.truncate(f / "rank-0000.safetensors", 9), "rank-0000.safetensors", "has 9 bytes"),
    "gone": (lambda f: (f / "rank-0001.safetensors").unlink(), "rank-0001.safetensors", "is missing"),
    "folder": (lambda f: swap_for_folder(f / "rank-0000.safetensors"), "rank-0000.safetensors", ""),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), MANIFEST, "was never completed"),
    "torn manifest": (lambda f: os.truncate(f / MANIFEST, 40), MANIFEST, "is no JSON"),
    "not a manifest": (lambda f: (f / MANIFEST).write_text('{"format": 1}'), MANIFEST, "lacks field"),
    "a list": (lambda f: (f / MANIFEST).write_text("[]"), MANIFEST, "is a JSON list"),
    "newer format": (lambda f: edit(f, format=9), MANIFEST, "has format 9"),
    "points elsewhere": (
        lambda f: edit(f, files=[{"name": "../x", "size": 1, "checksum": ""}]), MANIFEST, "names the file '../x'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_named(tmp_path: Path, damage: str) -> None:
    """Every kind of damage is refused in a sentence, with the file that is wrong."""
    inflict, file, text = DAMAGES[damage]
    folder = make(tmp_path, 20)
    inflict(folder)
    with pytest.raises(CheckpointError) as error:
        manifest.verify(folder)
    assert error.value.file == file
    assert text in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["", "rank-0001.safetensors"])
def test_a_failing_storage_is_no_damage(tmp_path: Path, name: str) -> None:
    """What cannot be read is told apart from what is wrong, be it the whole folder or a file."""
    folder = make(tmp_path, 20)
    (folder / name).rename(tmp_path / "away")
    (folder / name).symlink_to((folder / name).name)  # ELOOP, as good as any other error
    with pytest.raises(Unreadable, match="cannot be read: Too many levels of symbolic links"):
        manifest.verify(folder)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """There is no bit in a file that can flip unnoticed."""
    folder = make(tmp_path_factory.mktemp("c"), 20)
    path = folder / "rank-0000.safetensors"
    content = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        manifest.verify(folder)


def test_verification_can_be_shared(tmp_path: Path) -> None:
    """Of several readers that each check a part, exactly one finds a damaged file."""
    folder = make(tmp_path, 20, files=5)
    flip(folder / "rank-0003.safetensors")
    found = []
    for part in range(3):
        try:
            manifest.verify(folder, part, 3)
        except CheckpointError as error:
            found.append((part, error.file))
    assert found == [(0, "rank-0003.safetensors")]


def test_a_rejected_checkpoint_keeps_its_files(tmp_path: Path) -> None:
    """Setting aside ends its existence and deletes nothing; the manifest can still be read."""
    folder = make(tmp_path, 20)
    before = {path.name for path in folder.iterdir()}
    manifest.reject(folder)
    assert manifest.steps(tmp_path) == []
    assert {path.name for path in folder.iterdir()} == before - {MANIFEST} | {REJECTED}
    assert manifest.read(folder, REJECTED).step == 20


# Manifests that are none: refused in a sentence wherever checkpoints are read, and nothing else is kept from its
# work.


BAD, GOOD = 30, (10, 20)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two good checkpoints and one to be spoilt, the newest, in the folder of a run."""
    for step in (*GOOD, BAD):
        make(tmp_path / "checkpoints", step)
    return tmp_path / "checkpoints"


def assert_refused(root: Path) -> None:
    """The newest is refused in one sentence, the others are as good as ever."""
    folder = folder_of(root, BAD)
    with pytest.raises(CheckpointError) as refused:
        manifest.verify(folder)
    assert not isinstance(refused.value, Unreadable)
    assert refused.value.file == MANIFEST
    sentence = str(refused.value)
    assert sentence.isprintable() and sentence.startswith(f"{folder / MANIFEST} ") and len(sentence) < 500
    assert manifest.steps(root) == [*GOOD, BAD]
    assert manifest.newest(root) == GOOD[-1]
    listed = json.loads(run("list", root, "--json").output)["checkpoints"]
    assert [entry["state"] for entry in listed] == ["complete", "complete", "damaged"]
    verified = run("verify", root)
    assert verified.return_value == exitcodes.FAILED
    assert verified.output.count(": ok, 2 files") == 2
    assert f"step {BAD}: DAMAGED: {sentence}" in verified.output
    pruned = run("prune", root, "--keep", "1")
    assert pruned.return_value == exitcodes.OK
    assert f"step {BAD}: kept: its manifest is damaged" in pruned.output
    assert manifest.steps(root) == [GOOD[-1], BAD]


def sealed(**changes: object) -> Callable[[Path], object]:
    """A manifest with other values, whose checksum is right."""

    def write(path: Path) -> None:
        raw: dict[str, Any] = json.loads(path.read_bytes())
        del raw["checksum"]
        path.write_text(json.dumps(seal(raw | changes)))

    return write


def named(*names: object) -> Callable[[Path], object]:
    """A manifest of files with these names."""
    return sealed(files=[{"name": name, "size": 1, "checksum": "xxh3_128:" + "0" * 32} for name in names])


def sized(size: object) -> Callable[[Path], object]:
    return sealed(files=[{"name": "x", "size": size, "checksum": "xxh3_128:" + "0" * 32}])


def text(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Something else in the manifest's place."""

    def put(path: Path) -> None:
        path.rename(path.with_name("elsewhere"))
        make(path)

    return put


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        os.chdir(path.parent)
        end.bind(path.name)


ODD: dict[str, Callable[[Path], object]] = {
    **{f"name {name!r:.20}": named(name) for name in (
        "", ".", "..", "/etc/passwd", "a/b", "../x", "a\0b", "a\nb", "\ud800", "x" * 300, "ä" * 200, None, 7, [], {},
        MANIFEST, "manifest.json.pruned",
    )},
    "a name twice": named("x", "y", "x"),
    **{f"size {size!r:.20}": sized(size) for size in ("12", "large", -1, 1.0, True, None, [], 1 << 70)},
    **{f"step {step!r:.20}": sealed(step=step) for step in ("30", 30.0, True, -30, 31, 10**15, 1 << 70, None, [], {})},
    **{f"sample {sample!r:.20}": sealed(sample=sample) for sample in ("1", 1.5, -1, False, None, 1 << 63)},
    **{f"format {form!r:.20}": sealed(format=form) for form in ("2", 2.0, True, 0, -1, None, [])},
    **{f"layout {layout!r:.20}": sealed(layout=layout) for layout in ([], None, "dp2", {"dp": "2"}, {"dp": 0})},
    **{f"created {at!r:.20}": sealed(created=at) for at in ("now", None, -1.0, 10**400, True)},
    **{f"{field} {value!r:.20}": sealed(**{field: value})
       for field in ("config_digest", "tier", "run") for value in (None, 7, [], {})},
    **{f"files {files!r:.20}": sealed(files=files) for files in ([], {}, None, "x", [None], [["x", 1, "y"]], [{}])},
    **{f"checksum {c!r:.20}": sealed(files=[{"name": "x", "size": 1, "checksum": c}])
       for c in ("", "md5:00", "xxh3_128:" + "G" * 32, None, 7)},
    "a field too many": sealed(more=1),
    "empty": text(b""),
    "binary": text(bytes(range(256))),
    "UTF-16": text('{"format": 1}'.encode("utf-16")),
    "NaN": text(b'{"format": 1, "created": NaN}'),
    "infinity": text(b'{"format": 1, "created": -Infinity}'),
    "a number without end": text(b'{"format": 1' + b"0" * 10_000 + b"}"),
    "nested deeply": text(b'{"format": 1, "files": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "objects nested deeply": text(b'{"a":' * 100_000),
    "a word": text(b'"manifest"'),
    "a gigabyte": lambda path: os.truncate(path, 1 << 30),
    "a folder": replaced(Path.mkdir),
    "a pipe": replaced(os.mkfifo),
    "a socket": replaced(bind),
    "a link to itself": replaced(lambda path: path.symlink_to(path.name)),
    "a link to nothing": replaced(lambda path: path.symlink_to("nothing")),
    "a link to a good one": replaced(lambda path: path.symlink_to("elsewhere")),
    "without its checksum": lambda path: path.write_text(
        json.dumps({name: value for name, value in json.loads(path.read_bytes()).items() if name != "checksum"})
    ),
}  # fmt: skip


@pytest.mark.parametrize("spoil", ODD.values(), ids=ODD.keys())
def test_what_is_no_manifest_is_refused(root: Path, spoil: Callable[[Path], object]) -> None:
    """Whatever stands there, and although its checksum may be right."""
    spoil(folder_of(root, BAD) / MANIFEST)
    assert_refused(root)


@pytest.mark.parametrize("spoil", [ODD["nested deeply"], ODD["a pipe"], ODD["a folder"], named("..")])
def test_one_that_was_being_removed_stops_nothing(root: Path, spoil: Callable[[Path], object]) -> None:
    """What is left of a removal and cannot be understood stays as it is; the list says so, the others go."""
    folder = folder_of(root, GOOD[0])
    spoil(folder / MANIFEST)
    os.rename(folder / MANIFEST, folder / PRUNED)
    assert prune(root, 1) == [GOOD[1]]
    listed = json.loads(run("list", root, "--json").output)["checkpoints"]
    assert [entry["state"] for entry in listed] == ["removed", "complete"]


def test_a_bad_one_does_not_keep_others_from_their_upload(root: Path, tmp_path: Path) -> None:
    """By hand and behind a commit; what is wrong is told at the end."""
    for step in (*GOOD, BAD):
        (folder_of(root, step) / remote.AWAITING).touch()
    named("..")(folder_of(root, GOOD[0]) / MANIFEST)
    uploaded = []
    with pytest.raises(CheckpointError, match="names the file"):
        uploaded += list(remote.upload_waiting(root, remote.Remote.open(str(tmp_path / "there"))))
    assert manifest.steps(tmp_path / "there") == [GOOD[1], BAD]
    assert run("upload", root, tmp_path / "by hand").return_value == exitcodes.OK
    assert manifest.steps(tmp_path / "by hand") == [GOOD[1], BAD]


@pytest.mark.parametrize("spoil", [ODD["empty"], ODD["a gigabyte"], ODD["a folder"], sealed(step=20), named("none")])
def test_a_bad_one_elsewhere_is_passed_over_when_one_is_fetched(
    root: Path, tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    """The next older one comes instead, also if the manifest names what is not there."""
    spoil(folder_of(root, BAD) / MANIFEST)
    there = remote.Remote.open(str(root))
    assert remote.fetch_newer(tmp_path / "here", there, -1) == GOOD[-1]
    assert manifest.steps(tmp_path / "here") == [GOOD[-1]]


def test_a_bad_folder_is_not_in_the_way_of_a_removal(root: Path) -> None:
    """Files that cannot be removed are told of when all that can go has gone."""
    stuck = folder_of(root, GOOD[0])
    file = next(stuck.glob("rank-*"))
    file.unlink()
    shutil.copytree(stuck, file)
    os.rename(stuck / MANIFEST, stuck / PRUNED)
    with pytest.raises(IsADirectoryError):
        prune(root, 1)
    assert manifest.steps(root) == [BAD]
    assert not folder_of(root, GOOD[1]).exists()


def test_a_manifest_of_the_format_before_is_read(root: Path) -> None:
    """Those of format 1 have no checksum; what is fetched or uploaded of them is written with one."""
    folder = folder_of(root, BAD)
    made = manifest.read(folder)
    (folder / MANIFEST).write_text(json.dumps(asdict(made) | {"format": 1}, indent=1))
    assert manifest.verify(folder).files == made.files
    assert manifest.newest(root) == BAD
    assert manifest.decode(manifest.encode(manifest.read(folder)), "x") == made


def test_a_manifest_of_a_newer_opsd_is_not_damaged(root: Path) -> None:
    """It is passed over and left as it is."""
    sealed(format=3, more=1)(folder_of(root, BAD) / MANIFEST)
    with pytest.raises(Unreadable, match="has format 3, this opsd reads formats 1 to 2"):
        manifest.verify(folder_of(root, BAD))


def test_no_flipped_bit_is_believed(tmp_path: Path) -> None:
    """All bits of a real manifest: each is refused, or says nothing else than was written."""
    folder = make(tmp_path, BAD)
    content, made, believed = (folder / MANIFEST).read_bytes(), manifest.read(folder), 0
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        (folder / MANIFEST).write_bytes(changed)
        try:
            assert manifest.read(folder) == made
            believed += 1
        except CheckpointError as error:
            assert not isinstance(error, Unreadable)
            assert str(error).isprintable()
    assert believed < 8 * len(content) / 20  # white space that became another


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A manifest with a part of it replaced, removed, doubled or added, and perhaps a right checksum over that."""
    entry = FileEntry("rank-0000.safetensors", 7, "xxh3_128:" + "0" * 32)
    raw = json.loads(manifest.encode(Manifest(BAD, 4, {"dp": 1}, "d", (entry,), "local", 1.7e9, "run")))
    del raw["checksum"]
    at: Any = raw
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = draw(st.sampled_from(keys))
        if not (isinstance(at[key], dict | list) and at[key] and draw(st.booleans())):
            break
        at = at[key]
    what = draw(st.sampled_from(["replace", "remove", "double", "add"]))
    if what == "replace":
        at[key] = draw(JSON)
    elif what == "remove":
        del at[key]
    elif isinstance(at, list):
        at.append(at[key] if what == "double" else draw(JSON))
    else:
        at[draw(st.text(max_size=5))] = draw(JSON)
    try:
        return json.dumps(seal(raw) if draw(st.booleans()) else raw | {"format": 1}).encode()
    except ValueError:  # NaN cannot be sealed
        return json.dumps(raw).encode()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=mutated() | st.binary(max_size=60))
@example(content=b"")
def test_no_manifest_whatever_is_more_than_a_refusal(tmp_path: Path, content: bytes) -> None:
    """Read, listed, verified and pruned, it gives a manifest that can be trusted to be one or a sentence."""
    folder, older = folder_of(tmp_path, BAD), folder_of(tmp_path, GOOD[0])
    if not older.exists():
        make(tmp_path, GOOD[0])
    folder.mkdir(exist_ok=True)
    (folder / MANIFEST).write_bytes(content)
    try:
        found = manifest.read(folder)
        assert found.step == BAD and found.sample >= 0 and found.files
        assert all((folder / entry.name).parent == folder and entry.size >= 0 for entry in found.files)
        assert {type(entry.name) for entry in found.files} == {str}
    except CheckpointError as error:
        assert str(error).isprintable()
    assert manifest.newest(tmp_path) in (GOOD[0], BAD)
    assert run("list", tmp_path, "--json").return_value == run("list", tmp_path).return_value == exitcodes.OK
    assert run("verify", tmp_path).return_value == exitcodes.FAILED  # it names files that are not there
    assert prune(tmp_path, 1) == []
    assert manifest.verify(older).step == GOOD[0]


# Removing checkpoints: what is kept, and what a removal touches.


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    """Only the newest stay, and the folders of the others go with them."""
    for step in (10, 20, 30, 40):
        make(tmp_path, step)
    assert prune(tmp_path, 2) == [10, 20]
    assert manifest.steps(tmp_path) == [30, 40]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000000030", "step-000000000040"]
    assert prune(tmp_path, 2) == []


def test_prune_never_removes_the_last(tmp_path: Path) -> None:
    """Even when told to keep none, the newest checkpoint stays."""
    make(tmp_path, 10)
    assert prune(tmp_path, 0) == []
    assert manifest.steps(tmp_path) == [10]


def test_prune_touches_only_what_the_manifest_names(tmp_path: Path) -> None:
    """A file that somebody put into a checkpoint folder stays, and so does the folder."""
    folder = make(tmp_path, 10)
    make(tmp_path, 20)
    (folder / "evaluation.json").write_text("{}")
    prune(tmp_path, 1)
    assert [path.name for path in folder.iterdir()] == ["evaluation.json"]


def test_prune_leaves_damaged_and_rejected_ones_alone(tmp_path: Path) -> None:
    """What cannot be read says nothing about what may be deleted; what was set aside waits for its post-mortem."""
    torn, rejected = make(tmp_path, 10), make(tmp_path, 20)
    (torn / MANIFEST).write_text("{")
    manifest.reject(rejected)
    make(tmp_path, 30)
    assert prune(tmp_path, 1) == []
    assert len(list(torn.iterdir())) == len(list(rejected.iterdir())) == 3


def test_an_interrupted_removal_is_completed(tmp_path: Path) -> None:
    """A checkpoint whose removal was cut short does not exist, and the next prune finishes it."""
    folder = make(tmp_path, 10)
    make(tmp_path, 20)
    os.rename(folder / MANIFEST, folder / PRUNED)
    (folder / "rank-0000.safetensors").unlink()
    assert manifest.steps(tmp_path) == [20]
    prune(tmp_path, 1)
    assert not folder.exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """A manifest that names a link removes the link, not what it points to."""
    folder = make(tmp_path / "c", 10)
    make(tmp_path / "c", 20)
    precious = tmp_path / "precious"
    shutil.copy(folder / "rank-0000.safetensors", precious)
    (folder / "rank-0000.safetensors").unlink()
    (folder / "rank-0000.safetensors").symlink_to(precious)
    prune(tmp_path / "c", 1)
    assert precious.exists()


def test_what_failed_saves_have_left_goes_after_an_hour(tmp_path: Path) -> None:
    """Parts and drafts by their names, up to the newest checkpoint; what may still be written stays."""
    old, young = tmp_path / "step-000000000010", tmp_path / "step-000000000015"
    newer = tmp_path / "step-000000000030"
    rejected = make(tmp_path, 12)
    (rejected / MANIFEST).rename(rejected / manifest.REJECTED)
    newest = make(tmp_path, 20)
    part = f"rank-0000.0000002a-1.{'0' * 32}.safetensors"
    for folder in (old, young, newer):
        folder.mkdir()
        (folder / part).touch()
    (old / ".rank-0001.0000002a-1.draft").touch()
    (rejected / part).touch()
    (newest / part).touch()
    (newest / "notes.txt").touch()
    for path in (*old.iterdir(), *newer.iterdir(), newest / part, newest / "notes.txt", rejected / part):
        os.utime(path, (0, 0))
    assert prune(tmp_path, 5) == []
    assert not old.exists()
    assert [(folder / part).exists() for folder in (young, newer, rejected, newest)] == [True, True, True, False]
    assert (newest / "notes.txt").exists()
    assert manifest.verify(newest).step == 20
