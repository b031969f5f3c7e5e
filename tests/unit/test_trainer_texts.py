"""Reading documents from files, tokenising them, and the tokenizers of others."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from opsd.trainer.data.__main__ import main
from opsd.trainer.data.build import PLAN, BuildTask, build, group
from opsd.trainer.data.shards import DOCUMENT, INDEX, TOKENIZER, DataError, Framing, Tally, read_index, verify
from opsd.trainer.data.texts import EMPTY, HALVES, NULL, UNREADABLE, Reading, find_files, read_texts
from opsd.trainer.data.tokenize import framing_of, load_tokenizer, make_corpus, train_tokenizer
from opsd.trainer.hf.export import _write_tokenizer
from tests.fakes.clock import until

# Reading documents from files, and tokenising many of them in parallel and in several goes.


TEXTS = [f"document {i} has größer words\n" * (i % 4 + 1) for i in range(50)]

JSONL = "".join(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(TEXTS)).encode()


def write_parquet(path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": TEXTS}), path)


def write_zstd(path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    half = JSONL.index(b"\n", len(JSONL) // 2) + 1
    compress = zstandard.ZstdCompressor().compress
    path.write_bytes(compress(JSONL[:half]) + compress(JSONL[half:]))  # two frames, as parallel compressors write them


def write_arrow(path: Path, *, stream: bool) -> None:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"text": TEXTS})
    with (arrow.ipc.new_stream if stream else arrow.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table)


def write_table(path: Path, delimiter: str) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([("id", "text"), *enumerate(TEXTS)])


RECORDS = json.dumps([{"text": text} for text in TEXTS]).encode()

FORMATS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(JSONL),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(JSONL)),
    "a.jsonl.zst": write_zstd,
    "a.jsonl.xz": lambda path: path.write_bytes(lzma.compress(JSONL)),
    "a.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(JSONL)),
    "a.JSONL": lambda path: path.write_bytes(JSONL),
    "a.json.gz": lambda path: path.write_bytes(gzip.compress(JSONL)),
    "a.json": lambda path: path.write_bytes(RECORDS),
    "of many lines.json": lambda path: path.write_bytes(json.dumps(json.loads(RECORDS), indent=1).encode()),
    "with a mark.jsonl": lambda path: path.write_bytes(codecs.BOM_UTF8 + JSONL),
    "utf-16.jsonl": lambda path: path.write_bytes(JSONL.decode().encode("utf-16")),
    "gzip by its content.jsonl": lambda path: path.write_bytes(gzip.compress(JSONL)),
    "a.csv": lambda path: write_table(path, ","),
    "a.tsv": lambda path: write_table(path, "\t"),
    "a.parquet": write_parquet,
    "stream.arrow": lambda path: write_arrow(path, stream=True),
    "file.arrow": lambda path: write_arrow(path, stream=False),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    """Each is found in a folder and read whole, whatever its name says of its compression."""
    FORMATS[name](tmp_path / name)
    others: Counter[str] = Counter()
    tally = Tally()
    assert list(read_texts(find_files([tmp_path], others=others), tally=tally)) == TEXTS
    assert (tally.files, tally.documents, tally.dropped, others) == (1, len(TEXTS), {}, {})


@pytest.mark.parametrize(
    ("name", "raw", "expected"),
    [
        ("a.txt", "größer".encode("latin-1"), r"is not utf-8 \(byte 2\); pass --encoding"),
        ("a.txt", "wide".encode("utf-16-le"), "has NUL bytes"),
        ("a.txt", b'{"text": "a"}\n{"text": "b"}\n', r'has JSON lines with "text"; name it a\.jsonl'),
        ("a.jsonl", '{"text": "größer"}\n'.encode("latin-1"), "is not utf-8; pass --encoding"),
        ("a.jsonl.gz", JSONL, "is not compressed as its name says"),
        ("a.parquet", JSONL, "is no Parquet file"),
        ("a.json", b'{"text": "a"}\n[', "line 2"),
        ("a.csv", b"id,body\n1,a\n", 'no column "text" but id, body'),
        ("a.csv", b"id,text\n1,a, b\n", "line 2: more columns than the 2"),
    ],
)
def test_what_would_be_read_as_something_else_is_refused(tmp_path: Path, name: str, raw: bytes, expected: str) -> None:
    """By name, with what to do; if it is to be left out, it is counted."""
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(DataError, match=expected):
        list(read_texts([tmp_path / name], reading=Reading()))
    with pytest.raises(DataError, match=expected.partition(";")[0]) as elsewhere:
        list(read_texts([tmp_path / name]))
    assert "--" not in str(elsewhere.value)
    tally = Tally()
    list(read_texts([tmp_path / name], reading=Reading(skip_unreadable=True), tally=tally))
    assert tally.dropped[UNREADABLE] == 1


def test_text_in_another_encoding_is_read_as_that(tmp_path: Path) -> None:
    """A byte order mark says which; without one it is what is passed."""
    (tmp_path / "a.txt").write_bytes("größer".encode("utf-16"))
    (tmp_path / "b.txt").write_bytes("größer".encode("latin-1"))
    assert list(read_texts(find_files([tmp_path]), reading=Reading(encoding="latin-1"))) == ["größer"] * 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_nulls_count_alike_in_all_formats(tmp_path: Path, name: str) -> None:
    """They are dropped and counted, as empty texts are."""
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    texts = ["a", None, "", None, "b"]
    table = arrow.table({"text": texts})
    if name == "a.parquet":
        arrow.parquet.write_table(table, tmp_path / name)
    elif name == "a.arrow":
        with arrow.ipc.new_file(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)
    else:
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tally = Tally()
    assert list(read_texts([tmp_path / name], tally=tally)) == ["a", "b"]
    assert (tally.documents, tally.dropped) == (2, {NULL: 2, EMPTY: 1})


def test_a_file_is_read_once_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    """By whatever way it is named; files that nobody reads are counted by suffix."""
    (tmp_path / "a.txt").write_text("once")
    (tmp_path / "b.txt").symlink_to("a.txt")
    (tmp_path / "c.txt").hardlink_to(tmp_path / "a.txt")
    for name in ("x.pdf", "y.pdf.gz", "README", ".hidden", "empty.json"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "package.json").write_text('{"name": "x", "scripts": {"text": "make"}}')
    (tmp_path / "api.json").write_text('{"text": {"type": "string"}}')
    (tmp_path / "numbers.csv").write_text("a,b\n1,text\n")
    others: Counter[str] = Counter()
    assert len(find_files([tmp_path, tmp_path / "a.txt", tmp_path / ".." / tmp_path.name], others=others)) == 1
    assert others == {
        "files that end in .pdf": 4,
        "files that end in README": 2,
        'files that end in .json and do not begin with a record that has "text"': 6,
        'files that end in .csv and do not begin with a record that has "text"': 2,
    }


def test_a_folder_without_texts_says_what_it_has(tmp_path: Path) -> None:
    """The user sees the file lie there, and must learn why it is not taken."""
    (tmp_path / "a.csv").write_text("id;text\n1;a\n")
    with pytest.raises(DataError, match=r'was found; 1 files that end in \.csv and do not begin .* "text" left out'):
        find_files([tmp_path])


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    """Corpora are put together by links; one that leads back to a folder above it ends there."""
    (tmp_path / "web").mkdir()
    (tmp_path / "web/a.jsonl").write_text('{"text": "a"}\n')
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, target in {"web": "../web", "again": "../web", "back": "."}.items():
        (corpus / name).symlink_to(target)
    assert [path.name for path in find_files([corpus])] == ["a.jsonl"]


def test_what_is_no_file_is_never_passed_over_in_silence(tmp_path: Path) -> None:
    """A pipe would wait for ever; behind a link to nothing there was a part of the corpus."""
    (tmp_path / "a.txt").write_text("a")
    os.mkfifo(tmp_path / "b.txt")
    others: Counter[str] = Counter()
    assert len(find_files([tmp_path], others=others)) == 1
    assert others == {"pipes, sockets or devices": 1}
    with pytest.raises(DataError, match=r"b\.txt is neither a file nor a folder"):
        find_files([tmp_path / "b.txt"])
    (tmp_path / "c.txt").symlink_to("gone")
    with pytest.raises(DataError, match=r"c\.txt is a link to nothing; remove it"):
        find_files([tmp_path])
    assert len(find_files([tmp_path], others=others, reading=Reading(skip_unreadable=True))) == 1
    assert others["links to nothing"] == 1


def test_one_of_several_columns_is_not_chosen_in_silence(tmp_path: Path) -> None:
    """The library would take the last one."""
    (tmp_path / "a.csv").write_text("text,text\na,b\n")
    with pytest.raises(DataError, match='has several columns "text"'):
        list(read_texts([tmp_path / "a.csv"]))


@pytest.mark.parametrize(
    ("option", "value"),
    [("--vocab", "-1"), ("--max-bytes", "-1"), ("--workers", "-1"), ("--shard-tokens", "0"), ("--encoding", "rot13")],
)
def test_an_option_out_of_range_is_refused(tmp_path: Path, option: str, value: str) -> None:
    """By its name, before a file is read."""
    (tmp_path / "a.txt").write_text("a")
    ended = CliRunner().invoke(main, [str(tmp_path), "--out", str(tmp_path / "out"), option, value])
    assert ended.exit_code != 0
    assert option in f"{ended.output} {ended.exception}"
    assert not (tmp_path / "out").exists()


def test_numbers_are_no_text(tmp_path: Path) -> None:
    """A column of numbers is refused in Parquet as in JSON lines."""
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    arrow.parquet.write_table(arrow.table({"text": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match='the column "text" has int64, not text'):
        list(read_texts([tmp_path / "a.parquet"]))


def test_half_an_emoji_does_not_end_a_build(tmp_path: Path) -> None:
    """Scraped JSON has texts that were cut within a surrogate pair; half a character is dropped and counted."""
    (tmp_path / "a.jsonl").write_text('{"text": "cut \\ud83d"}\n{"text": "whole \\ud83d\\ude00"}\n')
    tally = Tally()
    texts = list(read_texts([tmp_path / "a.jsonl"], tally=tally))
    assert tally.dropped == {HALVES: 1}
    assert texts == ["cut ", "whole \N{GRINNING FACE}"]
    assert len(train_tokenizer(texts, 300).encode_batch_fast(texts)) == 2


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.jsonl.xz", "a.jsonl.bz2", "a.parquet"])
def test_a_truncated_file_is_refused(tmp_path: Path, name: str) -> None:
    """Half a download is named, not silently used as far as it goes."""
    FORMATS[name](tmp_path / name)
    os.truncate(tmp_path / name, (tmp_path / name).stat().st_size // 2)
    with pytest.raises(DataError, match=name):
        list(read_texts([tmp_path / name]))


@pytest.mark.parametrize(
    ("line", "expected"),
    [(b'{"content": "x"}', "line 2: not a JSON object with"), (b"{", "line 2"), (b'{"text": 3}', "is not text")],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, expected: str) -> None:
    """A line that is no JSON or lacks the field is refused with its number."""
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=expected):
        list(read_texts([tmp_path / "a.jsonl"]))


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A Parquet file without the column says which it has."""
    write_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match='no column "body" but text'):
        list(read_texts([tmp_path / "a.parquet"], reading=Reading("body")))


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Several files, each a group of its own because they are large or are made one by one."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.jsonl").write_bytes(b"".join(JSONL.splitlines(keepends=True)[number * 10 :][:10]))
    return find_files([folder])


def shards_of(folder: Path) -> list[bytes]:
    return [(folder / shard.token_file.name).read_bytes() for shard in read_index(folder).shards]


def test_files_are_grouped_by_size(files: list[Path]) -> None:
    """Small files are put together, in their order."""
    assert group(files, 1 << 30) == [files]
    assert group(files, 1) == [[file] for file in files]


def test_a_build_gives_what_one_process_gives(tmp_path: Path, files: list[Path]) -> None:
    """The tokens of a build are those of the documents in the order of the files, and its records are gone."""
    tokenizer = train_tokenizer(TEXTS, 300)
    build(files, tokenizer, BuildTask(tmp_path / "out", Reading(), Framing(), 10**6, 1), workers=1)
    make_corpus(TEXTS, tokenizer, tmp_path / "plain", 10**6)
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "plain")
    verify(tmp_path / "out", read_index(tmp_path / "out"), content=True)
    assert not (tmp_path / "out" / PLAN).exists()


def test_a_build_goes_on_where_it_was(tmp_path: Path, files: list[Path]) -> None:
    """Interrupted, a build does only what is left; with other settings it is refused."""
    tokenizer = train_tokenizer(TEXTS, 300)
    job = BuildTask(tmp_path / "out", Reading(), Framing(), 10**6, 1)
    big = tmp_path / "in" / "9.jsonl"
    big.write_bytes(b"not json\n")
    with pytest.raises(DataError, match=r"9\.jsonl"):
        build([*files, big], tokenizer, job, workers=1)
    assert not (job.folder / INDEX).exists()
    with pytest.raises(DataError, match="was begun with other files"):
        build(files, tokenizer, job, workers=1)


PROGRAM = """
import sys
from pathlib import Path
from tokenizers import Tokenizer
from opsd.trainer.data.build import BuildTask, build
from opsd.trainer.data.shards import Framing
from opsd.trainer.data.texts import Reading
source, out, tokenizer = map(Path, sys.argv[1:])
job = BuildTask(out, Reading(), Framing(), 10**6, 1, 1)
build(sorted(source.iterdir()), Tokenizer.from_file(str(tokenizer)), job, workers=2)
"""


@pytest.mark.slow
def test_a_build_survives_a_kill(tmp_path: Path) -> None:
    """Killed in the middle of a parallel build and run again, it does the rest and gives what one process gives."""
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for number in range(6):
        (source / f"{number}.jsonl").write_bytes(JSONL * 300)
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    command = [sys.executable, "-c", PROGRAM, source, out, tmp_path / "tokenizer.json"]
    process = subprocess.Popen(command, start_new_session=True)
    until(lambda: list(out.glob("part-*.json")), 120)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (out / INDEX).exists()
    parts = [f"shard-{path.stem[5:]}-00000.tokens" for path in out.glob("part-*.json")]
    written = {name: (out / name).stat().st_mtime_ns for name in parts}
    subprocess.run(command, check=True, timeout=120)
    assert written == {name: (out / name).stat().st_mtime_ns for name in parts}
    make_corpus(TEXTS * 300, tokenizer, tmp_path / "plain", 10**9)
    assert b"".join(shards_of(out)) == shards_of(tmp_path / "plain")[0] * 6


# Tokenizers that others have made: what is left on in their files, and which tokens stand around a document.


SAMPLES = ["the cat sat on the mat and größer things " * 9, "a dog and a cat"]


def made(folder: Path, *special: str, bos: str = "", eos: str = "") -> Tokenizer:
    """A byte-level tokenizer with ``special`` tokens that puts ``bos`` and ``eos`` around a text, in ``folder``."""
    tokenizer = train_tokenizer(SAMPLES, 280)
    raw = json.loads(tokenizer.to_str())
    raw["added_tokens"] = []
    raw["model"]["vocab"] = {token: id_ - 1 for token, id_ in raw["model"]["vocab"].items() if token != DOCUMENT}
    tokenizer = Tokenizer.from_str(json.dumps(raw))
    tokenizer.model.unk_token = None
    tokenizer.add_special_tokens(list(special))
    if bos or eos:
        around = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A {eos}".split(), special_tokens=around
        )
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / TOKENIZER))
    return tokenizer


def ids(folder: Path) -> list[int]:
    return [
        int(id_)
        for shard in read_index(folder).shards
        for id_ in np.fromfile(folder / shard.token_file.name, read_index(folder).dtype)
    ]


def truncated(tokenizer: Tokenizer) -> None:
    tokenizer.enable_truncation(5)


def padded(tokenizer: Tokenizer) -> None:
    tokenizer.enable_padding(length=64)


def random(tokenizer: Tokenizer) -> None:
    tokenizer.model.dropout = 0.5


@pytest.mark.parametrize("leave_on", [truncated, padded, random])
def test_what_is_left_on_in_a_file_changes_no_corpus(tmp_path: Path, leave_on: object) -> None:
    """A tokenizer that was saved while it cut, filled up or drew by chance gives the ids of one that did not."""
    plain = train_tokenizer(SAMPLES, 280)
    make_corpus(SAMPLES, plain, tmp_path / "plain", 10**6)
    assert callable(leave_on)
    leave_on(plain)
    plain.save(str(tmp_path / TOKENIZER))
    make_corpus(SAMPLES, load_tokenizer(tmp_path / TOKENIZER), tmp_path / "mine", 10**6)
    assert ids(tmp_path / "mine") == ids(tmp_path / "plain")
    made_with = json.loads((tmp_path / "mine" / TOKENIZER).read_text())
    assert (made_with["truncation"], made_with["padding"], made_with["model"]["dropout"]) == (None, None, None)


@pytest.mark.parametrize(
    ("special", "around", "beside", "expected"),
    [
        (["<|endoftext|>", "<|pad|>"], {}, {}, Framing("<|endoftext|>")),
        (["<s>", "</s>"], {"bos": "<s>"}, {}, Framing("</s>", ("<s>",))),
        (["<s>", "</s>"], {"bos": "<s>", "eos": "</s>"}, {}, Framing("</s>", ("<s>",))),
        (["[CLS]", "[SEP]"], {"bos": "[CLS]", "eos": "[SEP]"}, {}, Framing("[SEP]", ("[CLS]",))),
        (["<|endoftext|>", "<|im_end|>"], {}, {"eos_token": "<|im_end|>"}, Framing("<|im_end|>")),
        (["<eos>", "</s>"], {}, {"eos_token": {"content": "<eos>"}}, Framing("<eos>")),
        (["<|endoftext|>"], {"bos": "<|endoftext|>"}, {}, Framing("<|endoftext|>")),
    ],
)
def test_the_separator_is_the_tokenizer_s_own(
    tmp_path: Path, special: list[str], around: dict[str, str], beside: dict[str, object], expected: Framing
) -> None:
    """Nothing is added to a vocabulary, and a text begins as the tokenizer itself begins it."""
    tokenizer = made(tmp_path, *special, **around)
    size = tokenizer.get_vocab_size()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside))
    loaded = load_tokenizer(tmp_path / TOKENIZER)
    assert framing_of(loaded, tmp_path / TOKENIZER) == expected
    assert loaded.get_vocab_size() == size


def test_a_tokenizer_that_does_not_say_is_asked_about(tmp_path: Path) -> None:
    """Two well-known names, or none; the option names one, which is added if it is missing."""
    for special, expected in (
        (("</s>", "<eos>"), "it has </s> and <eos>"),
        ((), "--separator '<|document|>' adds one"),
    ):
        made(tmp_path, *special)
        loaded = load_tokenizer(tmp_path / TOKENIZER)
        with pytest.raises(DataError, match="does not say which token ends a text; name it with --separator") as error:
            framing_of(loaded, tmp_path / TOKENIZER)
        assert expected in str(error.value)
    assert framing_of(loaded, separator=DOCUMENT) == Framing()
    assert loaded.token_to_id(DOCUMENT) is not None


def test_shards_and_export_have_the_same_tokens_around_a_text(tmp_path: Path) -> None:
    """Each document begins with BOS and ends with EOS, the index says so, and an exported model is told of both."""
    tokenizer = made(tmp_path, "<s>", "</s>", bos="<s>")
    index = make_corpus(SAMPLES, load_tokenizer(tmp_path / TOKENIZER), tmp_path / "corpus", 10**6)
    bos, eos = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    expected = [id_ for text in SAMPLES for id_ in (*tokenizer.encode(text).ids, eos)]
    assert ids(tmp_path / "corpus") == expected
    assert expected.count(bos) == 2
    assert index.framing == read_index(tmp_path / "corpus").framing == Framing("</s>", ("<s>",))
    (tmp_path / "exported").mkdir()
    told = _write_tokenizer(tmp_path / "corpus" / TOKENIZER, index.framing, tmp_path / "exported", 64)
    assert told == {"bos_token_id": bos, "eos_token_id": eos}


def test_a_tokenizer_for_another_script_is_refused(tmp_path: Path) -> None:
    """One without bytes drops what it does not know in silence."""
    narrow = Tokenizer(models.BPE(vocab={DOCUMENT: 0, **{letter: at for at, letter in enumerate("abc", 1)}}, merges=[]))
    narrow.pre_tokenizer = pre_tokenizers.Whitespace()
    make_corpus(["abc cab"], narrow, tmp_path / "known", 10**6)
    with pytest.raises(DataError, match=r"no token for 50\.0% of the characters of the first 2 documents"):
        make_corpus(["abc", "xyz"], narrow, tmp_path / "unknown", 10**6)


@pytest.mark.parametrize("kind", ["words", "unigram"])
def test_unknown_tokens_are_no_text(tmp_path: Path, kind: str) -> None:
    """A corpus of them trains well, and means nothing."""
    vocab = {"<unk>": 0, DOCUMENT: 1, "the": 2}
    model = (
        models.WordLevel(vocab, unk_token="<unk>")
        if kind == "words"
        else models.Unigram([(word, -1.0) for word in vocab], unk_id=0)
    )
    narrow = Tokenizer(model)
    narrow.pre_tokenizer = pre_tokenizers.Whitespace()
    make_corpus(["the the"], narrow, tmp_path / "known", 10**6)
    with pytest.raises(DataError, match=r"no token for [45]\d\.\d% of the characters"):
        make_corpus(["the cat the dog"], narrow, tmp_path / "unknown", 10**6)


def test_a_tokenizer_that_cannot_encode_a_text_is_refused(tmp_path: Path) -> None:
    """The library raises a bare Exception where a word has no token, and no unknown one either."""
    narrow = Tokenizer(models.WordLevel({DOCUMENT: 0, "a": 1, "the": 2}))
    narrow.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(DataError, match="cannot encode a document: "):
        make_corpus(["the cat"], narrow, tmp_path / "corpus", 10**6)
