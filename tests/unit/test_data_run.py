"""Runs of pipelines: what is done stays done, what has changed is refused by name, and no document is lost unseen."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd.data.pipeline import PipelineError, load
from opsd.data.records import Attempt, Flow, StageFolder
from opsd.data.run import Run, Tries
from opsd.data.status import status
from opsd.data.task import Meter, Tasks, lasting
from tests.fakes.pipelines import PIPELINE, Here, contents, make_pipeline, make_raw, run_here

LINES = b'{"text": "a text that is long", "id": "1"}\n'


def texts_in(folder: Path) -> list[str]:
    """The texts of all files, in order."""
    files = (gzip.decompress(raw) for _, raw in sorted(contents(folder).items()))
    return [json.loads(line)["text"] for file in files for line in file.splitlines()]


def test_documents_are_counted_and_done_is_done(tmp_path: Path) -> None:
    """A second call runs nothing and writes nothing."""
    file = make_pipeline(tmp_path)
    assert run_here(file)
    found = status(tmp_path / "pipeline")
    first, second = found["stages"]
    raw = [json.loads(line)["text"] for each in contents(tmp_path / "raw").values() for line in each.splitlines()]
    long = sum(len(text) > 10 for text in raw)
    assert [flow["documents"]["out"] for flow in first["flows"]] == [200, long, long]
    assert first["flows"][1]["reasons"] == {"short": 200 - long}
    reader, shout, kept, _ = second["flows"]
    assert reader["documents"]["made"] == long
    assert shout["bytes"]["edited"] == 0  # Ö has as many bytes as ö
    assert kept["documents"]["in"] == kept["documents"]["out"] + kept["documents"]["dropped"] == long
    texts = texts_in(tmp_path / "final")
    assert len(texts) == kept["documents"]["out"] == sum("7" in text for text in texts)
    assert sum(len(text.encode()) for text in texts) == kept["bytes"]["out"]
    assert found["stages"][0]["state"] == "done"
    before, again = contents(tmp_path), Here()
    assert run_here(file, again)
    assert (again.ran, contents(tmp_path)) == ([], before)


def add_a_file(folder: Path) -> None:
    shutil.copy(folder / "raw/000.jsonl", folder / "raw/0000.jsonl")
    with open(folder / "raw/0000.jsonl", "a") as file:
        file.write(json.dumps({"text": "one more text", "id": "more"}) + "\n")


@pytest.mark.parametrize(
    ("change", "told", "ran"),
    [
        ((lambda text: text.replace("LEAST = 10", "LEAST = 11")), "step 2 (LambdaFilter) has another code", (1, 2)),
        ((lambda text: text.replace('"7" in', '"8" in')), "stage 2 was begun with something else: step 3", (2,)),
        ((lambda text: text.replace("tasks=3", "tasks=2")), "it had 3 tasks and now has 2", (1, 2)),
        ((lambda text: text.replace(".upper()", ".lower()")), "step 2 (shout)", (2,)),
        (add_a_file, "raw/0000.jsonl is new", (1, 2)),
        ((lambda folder: (folder / "raw/001.jsonl").unlink()), "raw/001.jsonl is gone", (1, 2)),
        ((lambda folder: (folder / "raw/002.jsonl").write_text('{"text": "short and new", "id": "1"}\n')),
         "raw/002.jsonl is shorter", (1, 2)),
    ],
)  # fmt: skip
def test_what_has_changed_is_refused_and_run_again_on_demand(
    tmp_path: Path, change: Callable[[Any], Any], told: str, ran: tuple[int, ...]
) -> None:
    """Run again, the outputs are those of a run that has known nothing else: no file of the old tasks is left."""
    file, fresh = make_pipeline(tmp_path / "one"), tmp_path / "two"
    run_here(file)
    text = PIPELINE
    if "folder" in change.__code__.co_varnames:
        change(tmp_path / "one")
    else:
        text = change(PIPELINE)
        make_pipeline(tmp_path / "one", text)
    before = contents(tmp_path / "one/final")
    with pytest.raises(PipelineError, match=r".*".join(map(str, told.replace("(", r"\(").replace(")", r"\)").split()))):
        run_here(file)
    assert contents(tmp_path / "one/final") == before
    engine = Here()
    assert run_here(file, engine, redo=True)
    assert {number for number, _ in engine.ran} == set(ran)
    shutil.copytree(tmp_path / "one/raw", fresh / "raw")
    run_here(make_pipeline(fresh, text))
    for folder in ("kept", "final"):
        here, there = contents(tmp_path / "one" / folder), contents(fresh / folder)
        assert here.keys() == there.keys()
        assert texts_in(tmp_path / "one" / folder) == texts_in(fresh / folder)


def test_comments_change_nothing(tmp_path: Path) -> None:
    """Neither do lines that are moved, nor a run from another process."""
    file = make_pipeline(tmp_path)
    run_here(file)
    make_pipeline(tmp_path, "# A comment.\n\n" + PIPELINE.replace("def shout", "# Loud.\ndef shout"))
    engine = Here()
    assert run_here(file, engine)
    assert engine.ran == []


def test_a_file_on_one_node_changes_no_digest(tmp_path: Path) -> None:
    """Code that writes to a path of the node's own disk is the same whether the file is there or not."""
    text = PIPELINE.replace(
        "        yield document", f"        open('{tmp_path}/scratch', 'w').close()\n        yield document"
    )
    file = make_pipeline(tmp_path, text)
    before = [stage.steps for stage in load(file)]
    (tmp_path / "scratch").write_text("something")
    assert [stage.steps for stage in load(file)] == before


def test_addresses_and_scratch_folders_change_no_digest(tmp_path: Path) -> None:
    """The tokenizer of datatrove has a generator of random numbers, whose name has an address, and a working folder."""
    text = (
        PIPELINE.replace(
            "LEAST = 10",
            """
from datatrove.io import get_datafolder
from numpy.random import default_rng

class Least:
    def __init__(self):
        self.rand, self.local_working_dir = default_rng(), get_datafolder("FOLDER/scratch")

LEAST = Least()""",
        )
        .replace("> LEAST", "> LEAST.rand.integers(1)")
        .replace("LambdaFilter(is_long)", "LambdaFilter(is_long, LEAST)")
    )
    file = make_pipeline(tmp_path, text)
    both = [load(file), load(file)]
    assert both[0][0].steps == both[1][0].steps
    assert both[0][0].inputs == [str(tmp_path / "raw")]


def test_a_step_that_writes_into_its_input_is_refused(tmp_path: Path) -> None:
    """Before it has done so: others read there, and nothing would prove what it has written."""
    text = PIPELINE.replace(
        "    for document in documents:\n        document.text",
        """
    from datatrove.io import get_datafolder
    get_datafolder("FOLDER/kept").open("all", "w")
    for document in documents:
        document.text""",
    )
    said: list[str] = []
    assert not run_here(make_pipeline(tmp_path, text), said=said)
    assert "kept/all into a folder that its stage reads" in said[-1]
    assert not (tmp_path / "kept/all").exists()


MANY = PIPELINE.replace("tasks=3", "tasks=200").replace("tasks=2\n", "tasks=4\n")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished first stage of 200 files."""
    folder = tmp_path_factory.mktemp("many")
    make_raw(folder / "raw", files=200, documents=8)
    file = make_pipeline(folder, MANY)

    def stop(number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_here(file, Here(stop))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("what", ["missing", "truncated", "doubled", "changed"])
def test_a_bad_file_of_200_is_named(many: Path, what: str) -> None:
    """Twenty of twenty, wherever it is, before the next stage reads it."""
    rng = random.Random(what)
    for _ in range(20):
        path = many.parent / "kept" / f"{rng.randrange(200):05d}.jsonl.gz"
        raw, kept, about = path.read_bytes(), path.with_name("aside"), path.stat()
        named = path
        path.rename(kept.with_suffix(".opsd-test"))
        if what == "truncated":
            path.write_bytes(raw[:-1])
        elif what == "changed":
            path.write_bytes(raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:])
        elif what == "doubled":
            path.write_bytes(raw)
            named = path.with_name(f"{rng.randrange(1000, 2000):05d}.jsonl.gz")
            named.write_bytes(raw)
        kept.with_suffix(".opsd-test").rename(many.parent / "aside")
        with pytest.raises(PipelineError) as refused:
            run_here(many, Here())
        assert named.name in str(refused.value)
        named.unlink(missing_ok=True)
        (many.parent / "aside").rename(path)
        assert path.stat().st_mtime_ns == about.st_mtime_ns


@pytest.mark.slow
def test_damaged_files_are_made_again(many: Path) -> None:
    """With the same bytes, by their own tasks alone."""
    before = contents(many.parent / "kept")
    (many.parent / "kept/00017.jsonl.gz").unlink()
    (many.parent / "kept/00042.jsonl.gz").write_bytes(b"x")
    engine = Here()
    assert run_here(many, engine, redo=True)
    assert [rank for number, rank in engine.ran if number == 1] == [17, 42]
    assert contents(many.parent / "kept") == before


def test_an_input_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """Two names for one content: its documents would be read twice."""
    file = make_pipeline(tmp_path)
    shutil.copy(tmp_path / "raw/003.jsonl", tmp_path / "raw/copy.jsonl")
    with pytest.raises(PipelineError, match=r"copy\.jsonl has the content of 003\.jsonl"):
        run_here(file)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("9.jsonl", b'{"text": "a text that is long", "id": "1"}\n{"text": "cut o', "9.jsonl"),
        (
            "9.jsonl.gz",
            gzip.compress(LINES * 99, mtime=0)[:-20],
            "9.jsonl.gz",
        ),
        ("9.jsonl", b'{"text": "\xff\xfe\x00"}\n', "9.jsonl"),
        ("9.jsonl.zst", zstandard.compress(LINES * 9999)[:-20], "9.jsonl.zst"),
        ("9.jsonl.zst", zstandard.compress(LINES) + zstandard.compress(LINES)[:-3], "9.jsonl.zst"),
        ("9.jsonl.zst", b"", "9.jsonl.zst is empty"),
        ("9.jsonl.gz", b"", "9.jsonl.gz is empty"),
        (
            "9.jsonl",
            b'{"content": "a text"}\n',
            "9.jsonl has a text: JsonlReader looks for 'text', and there are content",
        ),
    ],
    ids=[
        "cut off",
        "gzip that is cut off",
        "not UTF-8",
        "zstd that is cut off",
        "its second frame is cut off",
        "zstd of 0 bytes",
        "gzip of 0 bytes",
        "another key",
    ],
)
def test_a_file_that_cannot_be_read_to_its_end_fails_its_task(
    tmp_path: Path, name: str, content: bytes, told: str
) -> None:
    """Readers of datatrove leave out such documents with a warning in a log."""
    file = make_pipeline(tmp_path)
    (tmp_path / "raw" / name).write_bytes(content)
    said: list[str] = []
    assert not run_here(file, said=said)
    assert told in said[-1]
    assert contents(tmp_path / "kept").keys() == {"00000.jsonl.gz", "00001.jsonl.gz"}


def test_all_frames_of_a_zstd_file_are_read(tmp_path: Path) -> None:
    """As several programs write them; zstandard's own reader ends after the first."""
    file = make_pipeline(tmp_path)
    (tmp_path / "raw/9.jsonl.zst").write_bytes(zstandard.compress(LINES * 5) + zstandard.compress(LINES * 4))
    assert run_here(file)
    assert texts_in(tmp_path / "kept").count("a text that is long") == 9


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (LINES * 41 + b"\n" + LINES + b'{"text": "half', "after line 43"),
        (b"{}x\n" + LINES, "before its first document"),
    ],
)
def test_the_place_of_a_damaged_line_is_told(tmp_path: Path, content: bytes, told: str) -> None:
    """The parser knows the line only, and calls it line 1."""
    file, said = make_pipeline(tmp_path), list[str]()
    (tmp_path / "raw/9.jsonl").write_bytes(content)
    assert not run_here(file, said=said)
    assert f"(the file is damaged {told})" in said[-1]


def test_empty_lines_are_no_damage(tmp_path: Path) -> None:
    """Many programs end a file with one."""
    file = make_pipeline(tmp_path)
    (tmp_path / "raw/9.jsonl").write_bytes(b"\n" + LINES + b" \r\n" + LINES + b"\n\n")
    (tmp_path / "raw/99.jsonl").write_bytes(b"\n")
    assert run_here(file)
    assert texts_in(tmp_path / "kept").count("a text that is long") == 2


def test_empty_texts_are_counted_as_dropped(tmp_path: Path) -> None:
    """A document may be empty; the others of its file have texts."""
    file = make_pipeline(tmp_path)
    (tmp_path / "raw/9.jsonl").write_bytes(b'{"text": "", "id": "1"}\n' * 3 + LINES)
    assert run_here(file)
    reader = status(tmp_path / "pipeline")["stages"][0]["flows"][0]
    assert reader["reasons"] == {"without text": 3}
    assert (reader["documents"]["made"], reader["documents"]["out"], reader["documents"]["dropped"]) == (204, 201, 3)


def test_an_input_that_goes_before_it_is_read_is_missed(tmp_path: Path) -> None:
    """A task finds its files when it begins."""
    gone = tmp_path / "raw/004.jsonl"
    with pytest.raises(PipelineError, match=r"004\.jsonl was removed before it was read"):
        run_here(make_pipeline(tmp_path), Here(lambda _: gone.unlink(missing_ok=True)))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda raw: os.mkfifo(raw / "pipe.jsonl"), r"raw/pipe\.jsonl is not a file, but a pipe"),
        (lambda raw: (raw / "more").symlink_to(raw.parent / "elsewhere"), "raw/more is not a file"),
        (lambda raw: (raw / "gone.jsonl").symlink_to("nowhere"), r"raw/gone\.jsonl is not a file"),
        (shutil.rmtree, "there is no file in"),
        (lambda raw: [path.unlink() for path in raw.iterdir()], "there is no file in"),
    ],
    ids=["pipe", "link to a folder", "link to nothing", "no folder", "no files"],
)
def test_what_is_no_file_is_refused_before_it_is_read(tmp_path: Path, make: Callable[[Path], Any], told: str) -> None:
    """A task would wait for a pipe for ever."""
    file, engine = make_pipeline(tmp_path), Here()
    make_raw(tmp_path / "elsewhere")
    make(tmp_path / "raw")
    with pytest.raises(PipelineError, match=told):
        run_here(file, engine)
    assert engine.ran == []


def test_an_input_that_changes_while_it_is_read_is_told(tmp_path: Path) -> None:
    """Before its task or after it. One that is removed after it was read is not missed."""
    file, raw = make_pipeline(tmp_path), tmp_path / "raw"
    rows = [json.dumps({"text": "one more text", "id": "more"}) + "\n"]
    engine = Here(after=lambda: (raw / "000.jsonl").write_text("".join(rows)))
    with pytest.raises(PipelineError, match=r"stage 1: \S*000\.jsonl is shorter while the stage ran"):
        run_here(file, engine)
    with pytest.raises(PipelineError, match=r"stage 1 was begun with something else: \S*000\.jsonl is shorter"):
        run_here(file)
    assert run_here(file, Here(after=lambda: (raw / "000.jsonl").unlink(missing_ok=True)), redo=True)


def test_two_runs_that_write_to_the_same_folder_are_not_at_once(tmp_path: Path) -> None:
    """Though they have states of their own; the second one changes nothing."""
    one, other = make_pipeline(tmp_path), tmp_path / "other.py"
    other.write_text(one.read_text().replace("LEAST = 10", "LEAST = 5"))
    refused: list[str] = []

    def meanwhile(number: int) -> None:
        with pytest.raises(PipelineError, match=r"another `opsd data run` works in \S*/kept: wait") as error:
            run_here(other)
        refused.append(str(error.value))

    assert run_here(one, Here(lambda number: meanwhile(number) if number == 1 else None))
    assert (len(refused), [*tmp_path.glob(".*.opsd")]) == (1, [])
    with pytest.raises(PipelineError, match="not of this run"):
        run_here(other)


def test_an_output_folder_may_be_a_link(tmp_path: Path) -> None:
    """Files are made ready beside the folder that it leads to, which may be on another file system."""
    file = make_pipeline(tmp_path)
    (tmp_path / "elsewhere/kept").mkdir(parents=True)
    (tmp_path / "kept").symlink_to(tmp_path / "elsewhere/kept")
    made: list[Path] = []
    assert run_here(file, Here(lambda number: made.extend((tmp_path / "elsewhere").iterdir()) if number == 2 else None))
    assert len(contents(tmp_path / "elsewhere/kept")) == 3
    assert not (tmp_path / ".kept.opsd").exists()


HELPER = "import again\nLEAST = again.LEAST\ndef least():\n    return LEAST\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import helper\ndef least():\n    return helper.least()", None),
        ("def least():\n    from helper import LEAST\n    return LEAST", None),
        ("from folder import helper\ndef least():\n    return helper.least()", None),
        ("import folder.helper\ndef least():\n    return folder.helper.least()", None),
        ("def least():\n    import folder.helper\n    return folder.helper.least()", None),
        ("import re\nP = re.compile('a')\ndef least():\n    return bool(P) * 10", ("('a')", "('a', re.I)")),
        ("import numpy\nR = numpy.random.default_rng(1).uniform\ndef least():\n    return R()", ("(1)", "(2)")),
        ("class T:\n    def __len__(self):\n        return 10\ndef least():\n    return len(T())", ("10", "11")),
        ("from pathlib import Path\nF = Path('FOLDER/words.txt')\ndef least():\n    return len(F.read_text())", None),
    ],
    ids=["module of a module", "import in a function", "folder", "its module", "in a function", "flags", "seed",
         "special method", "path"],
)  # fmt: skip
def test_whatever_a_step_uses_counts(tmp_path: Path, before: str, after: tuple[str, str] | None) -> None:
    """Also what it uses through others, wherever it is edited."""
    whole = PIPELINE.replace("LEAST = 10", before).replace("> LEAST", "> least()")
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/helper.py").write_text("from folder.more import LEAST\ndef least():\n    return LEAST\n")
    (tmp_path / "folder/more.py").write_text("from again import LEAST\n")
    (tmp_path / "again.py").write_text("LEAST = 10\n")
    (tmp_path / "words.txt").write_text("ten words.")
    file = make_pipeline(tmp_path, whole)
    script = "import pathlib, sys; from opsd.data.pipeline import load; print(load(pathlib.Path(sys.argv[1]))[0].steps)"

    def steps() -> str:
        return subprocess.run([sys.executable, "-c", script, file], capture_output=True, text=True, check=True).stdout

    planned = steps()
    assert steps() == planned
    if after is not None:
        file.write_text(file.read_text().replace(*after))
    else:
        (tmp_path / "again.py").write_text("LEAST = 11\n")
        (tmp_path / "words.txt").write_text("eleven words")
    assert steps() != planned


def test_two_attempts_at_once_write_one_result(tmp_path: Path) -> None:
    """The one that commits first wins; an attempt that was taken for lost changes nothing later."""
    file = make_pipeline(tmp_path)
    outcomes: list[str] = []

    class Twice(Here):
        def run(self, stage: Any, folder: StageFolder, ranks: Any, tell: Any) -> None:
            tasks = Tasks(stage, folder)
            for rank in ranks:
                outcomes.append(tasks.run(Attempt(rank)).outcome)
                before = contents(tmp_path / "kept")
                outcomes.append(tasks.run(Attempt(rank)).outcome)
                assert contents(tmp_path / "kept") == before

    assert run_here(file, Twice())
    assert outcomes == ["done", "superseded"] * 5
    assert not list(tmp_path.glob(".*.opsd"))


def test_an_attempt_of_an_earlier_plan_changes_nothing(tmp_path: Path) -> None:
    """It was taken for lost, and goes on after its stage was begun again."""
    file = make_pipeline(tmp_path)
    run_here(file)
    late = Tasks(load(file)[0], StageFolder(tmp_path / "pipeline", 1))
    make_pipeline(tmp_path, PIPELINE.replace("LEAST = 10", "LEAST = 12"))
    outcomes: list[str] = []

    def go_on(number: int) -> None:
        if number == 1:
            outcomes.append(late.run(Attempt(0)).why)

    assert run_here(file, Here(go_on), redo=True)
    assert outcomes == ["the stage was begun again while this attempt ran"]
    assert min(map(len, texts_in(tmp_path / "kept"))) > 12
    (tmp_path / "pipeline/stage-01/tasks/00000.json").write_text(
        (tmp_path / "pipeline/stage-01/tasks/00000.json").read_text().replace('"plan": "', '"plan": "0')
    )
    engine = Here()
    assert run_here(file, engine)
    assert engine.ran == [(1, 0)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("stages = 3", "has no `stages`"),
        ("raise SystemExit(4)", "fails: SystemExit"),
        ("import nothing_of_that_name", "fails: ModuleNotFoundError"),
        (PIPELINE.replace('"FOLDER/final"', '"FOLDER/kept"'), "reads .*kept and writes to"),
        (
            PIPELINE.replace('"FOLDER/final"', '"memory://final"'),
            "writes to memory://.*final, an object store: write to",
        ),
        (PIPELINE.replace("FOLDER/final", "FOLDER/pipeline"), "is a folder of stage 2: choose another --dir"),
        (
            PIPELINE + "from datatrove.pipeline.writers import HuggingFaceDatasetWriter\n"
            "stages[1].pipeline[-1] = HuggingFaceDatasetWriter('a/b', local_working_dir='FOLDER/hub')",
            "stage 2: Hugging.* uploads while its",
        ),
        (PIPELINE + "stages[1].run()", r"pipeline.py calls run\(\) of an executor: do that below"),
        (PIPELINE.replace("${rank}", "same"), "both write .*same.jsonl.gz"),
    ],
)
def test_a_pipeline_that_cannot_be_proved_is_refused(tmp_path: Path, text: str, told: str) -> None:
    """In one sentence."""
    with pytest.raises(PipelineError, match=told):
        run_here(make_pipeline(tmp_path, text))


def test_an_output_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    """The next stage would read them too."""
    file = make_pipeline(tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/old.jsonl").write_text("{}\n")
    with pytest.raises(PipelineError, match=r"old\.jsonl is not of this run"):
        run_here(file)


def test_a_step_that_stops_early_is_a_failure(tmp_path: Path) -> None:
    """Documents that nobody has asked for are lost without a trace otherwise."""
    text = PIPELINE.replace("        yield document", "        yield document\n        return")
    said: list[str] = []
    assert not run_here(make_pipeline(tmp_path, text), said=said)
    assert "the step after JsonlReader stopped before the end" in said[-1]


def test_documents_that_a_reader_leaves_out_are_missed(tmp_path: Path) -> None:
    """Readers of datatrove skip documents without a text; those were written by the stage before."""
    text = PIPELINE.replace('JsonlReader("FOLDER/kept")', 'JsonlReader("FOLDER/kept", adapter=no_text)').replace(
        "LEAST = 10", 'LEAST = 10\n\ndef no_text(self, data, path, number):\n    return {"text": "", "id": path}\n'
    )
    with pytest.raises(PipelineError, match=r"read 0 documents from .*kept, and \d+ were written there"):
        run_here(make_pipeline(tmp_path, text))


Documents = Iterator[Any]


def dropping(documents: Documents) -> Documents:
    return (each for each in documents if "a" not in each.text)


def editing(documents: Documents) -> Documents:
    for each in documents:
        each.text += "é"
        yield each


def doubling(documents: Documents) -> Documents:
    kept = []
    for each in documents:
        kept.append(SimpleNamespace(text=each.text))
        yield each
    yield from kept


def turning(documents: Documents) -> Documents:
    yield from reversed(list(documents))


def in_pairs(documents: Documents) -> Documents:
    while pair := list(islice(documents, 2)):
        yield from reversed(pair)


def size(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text("abéø𝄞", max_size=6), max_size=40),
    st.lists(st.sampled_from([dropping, editing, doubling, turning, in_pairs]), max_size=4),
)
def test_documents_and_bytes_are_counted_at_every_step(
    texts: list[str], steps: list[Callable[[Documents], Documents]]
) -> None:
    """What went out, was dropped, made and edited is what the step has done, in whatever order."""
    meters = [Meter(Flow("texts"))]
    documents: Any = meters[0](SimpleNamespace(text=text) for text in texts)
    for step in steps:
        meters.append(Meter(Flow(step.__name__), meters[-1]))
        documents = meters[-1](step(documents))
    out = [each.text for each in documents]
    for meter in meters:
        meter.settle()
    assert (meters[-1].flow.documents_out, meters[-1].flow.bytes_out) == (len(out), size(out))
    for meter in meters:
        flow, came = meter.flow, texts
        if flow.step == "dropping":
            texts = [text for text in texts if "a" not in text]
        elif flow.step == "editing":
            texts = [text + "é" for text in texts]
        elif flow.step in ("doubling", "texts"):
            made = len(texts), size(texts)
            assert (flow.documents_made, flow.bytes_made) == made
            texts = texts * 2 if flow.step == "doubling" else texts
        assert (flow.documents_out, flow.bytes_out) == (len(texts), size(texts))
        assert flow.edited == (2 * len(texts) if flow.step == "editing" else 0)
        if flow.step != "texts":
            assert (flow.documents_in, flow.bytes_in) == (len(came), size(came))
            dropped = [text for text in came if "a" in text] if flow.step == "dropping" else []
            assert (flow.documents_dropped, flow.bytes_dropped) == (len(dropped), size(dropped))


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        (["a", "b", "a"], 3), (["a", "a"], 2), (["b", "a", "a"], 3), (["a", None, "a"], 3), ([""] * 9, 4),
        (["a", "b", "a", "b"], 4), ([None] * 20, 11),
    ],
)  # fmt: skip
def test_the_same_error_twice_in_a_row_ends_a_task(errors: list[str | None], told: int) -> None:
    """None is an attempt that was killed; "" one that passes, of which three more are made."""
    said: list[str] = []
    tries = Tries(say=said.append)
    for error in errors:
        attempt = Attempt(1, outcome="" if error is None else "failed", error=error or "")
        if not tries.ended(attempt):
            break
    assert len(tries.tried[1]) == told


def test_what_may_pass_is_waited_for() -> None:
    """Longer each time; other attempts follow at once."""
    tries, pauses = Tries(), list[float]()
    for outcome, error in [("", ""), ("failed", ""), ("failed", "TypeError"), ("failed", ""), ("", ""), ("failed", "")]:
        tries.ended(Attempt(1, outcome=outcome, error=error))
        pauses.append(tries.pause(1))
    assert pauses == [0, 1, 0, 25, 0, 25]


@pytest.mark.parametrize(("name", "full"), [("ENOSPC", True), ("EDQUOT", True), ("EIO", False)])
def test_a_quota_is_a_disk_that_may_be_full(tmp_path: Path, name: str, full: bool) -> None:
    """The command ends with the exit code of a full disk; the reason has the folder, and what to do."""
    step = f"def fail(documents, rank=0, world_size=1):\n    raise OSError({getattr(errno, name)}, '{name}')\n"
    file, said = make_pipeline(tmp_path, step + PIPELINE.replace("LambdaFilter(is_long)", "fail")), list[str]()
    run = Run(file, file.with_suffix(""), load(file), Here(), said.append)
    assert (run.run(), run.full) == (False, full)
    assert f"{tmp_path}/kept: {name}; " in said[-1]


def test_an_attempt_without_memory_does_not_run_any_more(tmp_path: Path) -> None:
    """It has no outcome, like one that runs or was lost a moment ago, but its end is known."""
    file = make_pipeline(tmp_path)
    run_here(file, said=[])
    folder = StageFolder(tmp_path / "pipeline", 2)
    for rank, why in ((0, ""), (1, "short of memory")):
        folder.record(rank).unlink()
        folder.note(Attempt(rank, why=why))
    found = status(tmp_path / "pipeline")["stages"][1]
    assert (found["running"], found["lost"]) == (1, 1)


def test_the_same_error_of_many_tasks_is_told_a_few_times() -> None:
    """Another one is told all the same."""
    said: list[str] = []
    tries = Tries(say=said.append)
    for rank in range(300):
        tries.ended(Attempt(rank, outcome="failed", error="TypeError", why=f"file {rank}"))
    tries.ended(Attempt(300, outcome="failed", error="ValueError", why="other"))
    assert len(said) == 7
    assert (said[5], "other" in said[6]) == ("tasks that fail like this are not told any more", True)


@pytest.mark.parametrize(
    ("error", "lasts"),
    [
        (TypeError("no length"), "TypeError: no length"), (ImportError("no module"), "ImportError: no module"),
        (ValueError("<x at 0x7f12>"), "ValueError: <x>"), (SystemExit(0), "SystemExit: 0"),
        (FileNotFoundError(2, "No such file", "model"), "FileNotFoundError: [Errno 2] No such file: 'model'"),
        (gzip.BadGzipFile("Not a gzipped file"), "BadGzipFile: Not a gzipped file"),
        (MemoryError(), ""), (ConnectionError("reset"), ""), (TimeoutError(), ""),
        (OSError(errno.ENOSPC, "full"), ""), (OSError(errno.EIO, "I/O error"), ""),
        (OSError(errno.ESTALE, "stale"), ""),
    ],
)  # fmt: skip
def test_which_exceptions_would_come_again(error: BaseException, lasts: str) -> None:
    """Also if a step has raised another one because of it."""
    assert lasting(error) == lasts
    try:
        raise RuntimeError("a step failed") from error
    except RuntimeError as outer:
        assert bool(lasting(outer)) == bool(lasts)


def test_a_pipeline_needs_its_file(tmp_path: Path) -> None:
    """A file that does not exist is named."""
    with pytest.raises(PipelineError, match="cannot be read"):
        load(tmp_path / "none.py")
