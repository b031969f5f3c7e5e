"""Overlap is found where it was planted, near-duplicates as often as theory says, and nothing else."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from opsd.commands.main import cli
from opsd.data.overlap import WORDS, Evaluations, Item, NearDuplicates, words_of
from opsd.trainer.config import locate

RNG = random.Random(7)
VOCABULARY = ["".join(RNG.choices("abcdefghijklmnopqrst", k=RNG.randint(3, 8))) for _ in range(5000)]


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(VOCABULARY, k=words))


def test_planted_overlap_is_found_and_nothing_else() -> None:
    """Fifty of fifty: with other case, punctuation and line ends, at any place; twelve words in a row are too few."""
    rng = random.Random(1)
    items = [Item("set", number, sentence(rng, rng.randint(15, 60))) for number in range(50)]
    evaluations = Evaluations(items)
    documents, planted = [], {}
    for number in range(400):
        text = sentence(rng, 150)
        if number % 8 == 0:
            item = items[number // 8]
            words = item.text.split()
            start = rng.randrange(len(words) - WORDS + 1)
            part = ",\n".join(word.upper() for word in words[start : start + WORDS])
            text = f"{text} “{part}”! {sentence(rng, 150)}"
            planted[number] = item
        elif number % 8 == 1:
            text += " " + " ".join(items[number // 8].text.split()[: WORDS - 1]) + " " + sentence(rng, 20)
        documents.append(text)
    found = {number: evaluations.look(text) for number, text in enumerate(documents) if evaluations.look(text)}
    assert found.keys() == planted.keys()
    assert len(found) == 50
    assert all([each.item for each in found[number]] == [item] for number, item in planted.items())


@pytest.mark.parametrize(
    ("item", "document", "overlaps"),
    [
        ("What is the capital of France? Paris", "he asked: what is the capital of France? PARIS, she said", True),
        ("What is the capital of France? Paris", "what is the capital of France? London", False),
        ("今天天气很好我们去公园散步然后回家", "记者说:今天天气很好我们去公园散步然后回家。", True),
        ("too short", "too short", False),
    ],
)
def test_short_items_are_looked_for_as_a_whole(item: str, document: str, overlaps: bool) -> None:
    """Those of fewer than five words are counted as not looked for."""
    evaluations = Evaluations([Item("set", 0, item)])
    assert bool(evaluations.look(document)) == overlaps
    assert bool(evaluations.short) == (len(words_of(item)) < 5)


@pytest.mark.parametrize(
    "document",
    [
        "the qu\u00adick brown fox ju\u00admps over",
        "THE QUICK\u00a0BROWN \u201cFOX\u201d\u2014jumps, over",
        "\ufeffthe quick brown f\u2060ox jumps\u200b over",
        "\uff54\uff48\uff45 quick brown fox\njumps over",
    ],
)
def test_what_is_not_seen_does_not_count(document: str) -> None:
    """Nor do case, punctuation and the width of letters."""
    assert words_of(document) == ["the", "quick", "brown", "fox", "jumps", "over"]


def jaccard(one: str, other: str, n: int) -> float:
    grams = [{tuple(words[at : at + n]) for at in range(len(words) - n + 1)} for words in (one.split(), other.split())]
    return len(grams[0] & grams[1]) / len(grams[0] | grams[1])


def test_recall_of_near_duplicates_is_that_of_theory() -> None:
    """Over 1,500 pairs of every similarity, within three points; unrelated documents are not found."""
    rng = random.Random(3)
    sample = [sentence(rng, 80) for _ in range(1500)]
    near = NearDuplicates(sample, {"n_grams": 3, "num_buckets": 10, "hashes_per_bucket": 4})

    def chance(similarity: float) -> float:
        return 1 - (1 - similarity**4) ** 10

    expected = found = 0.0
    for text in sample:
        words = text.split()
        for _ in range(rng.randint(0, 12)):
            words[rng.randrange(len(words))] = rng.choice(VOCABULARY)
        changed = " ".join(words)
        expected += chance(jaccard(text, changed, 3))
        found += text in near.look(changed)
    assert 0.3 < expected / len(sample) < 0.97
    assert abs(found - expected) / len(sample) < 0.03
    assert not any(near.look(sentence(rng, 80)) for _ in range(300))


def test_the_command_reports_both_texts(tmp_path: Path) -> None:
    """Exit code 1 if a document overlaps, 0 if none does; nothing of the texts is changed."""
    rng = random.Random(5)
    question, copy = sentence(rng, 20), sentence(rng, 100)
    (tmp_path / "qa.jsonl").write_text(
        json.dumps({"context": question, "choices": [" yes", " no"], "answer": 0}) + "\n"
    )
    (tmp_path / "run.toml").write_text(
        f'{locate("tiny").read_text()}\n[evaluation]\ncloze = {{ qa = "{tmp_path}/qa.jsonl" }}\n'
    )
    (tmp_path / "sample.txt").write_text(copy)
    lines = [sentence(rng, 50), f"{sentence(rng, 9)} {question}", copy.replace(copy.split()[3], "other", 1)]
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    before, out = texts.read_bytes(), tmp_path / "report.jsonl"
    words = ["data", "overlap", str(texts), "--report", str(out), "--evaluations", str(tmp_path / "run.toml"),
             "--sample", str(tmp_path / "sample.txt")]  # fmt: skip
    assert CliRunner().invoke(cli, words, standalone_mode=False).return_value == 1
    first, second = map(json.loads, out.read_text().splitlines())
    assert (first["document"], first["evaluations"][0]["set"], first["evaluations"][0]["text"]) == (1, "qa", question)
    assert question in first["text"]
    assert (second["document"], second["near_duplicates_of"]) == (2, [copy])
    assert texts.read_bytes() == before
    texts.write_text(json.dumps({"text": lines[0]}) + "\n")
    assert CliRunner().invoke(cli, words, standalone_mode=False).return_value == 0
    assert CliRunner().invoke(cli, words[:5]).exit_code == 2


@pytest.mark.parametrize(
    ("texts", "words", "told"),
    [
        ('{"text": "a b"}', ["--evaluations", "tiny"], "tiny: its [evaluation] has no text"),
        ("", ["--sample", "SAMPLE"], "there is no document in"),
        ('{"text": "a b"}', ["--sample", "EMPTY"], "has no document to look for"),
        ('{"content": "a b"}', ["--sample", "SAMPLE"], 'line 1: not a JSON object with "text"\n'),
    ],
)
def test_nothing_to_compare_is_no_success(tmp_path: Path, texts: str, words: list[str], told: str) -> None:
    """Exit code 2; what is told names no option that the command has not."""
    (tmp_path / "EMPTY.jsonl").touch()
    (tmp_path / "SAMPLE.txt").write_text("some text")
    (tmp_path / "texts.jsonl").write_text(texts)
    names = {"EMPTY": str(tmp_path / "EMPTY.jsonl"), "SAMPLE": str(tmp_path / "SAMPLE.txt")}
    given = [str(tmp_path / "texts.jsonl"), *(names.get(word, word) for word in words), "--report", str(tmp_path / "r")]
    done = CliRunner().invoke(cli, ["data", "overlap", *given])
    assert (done.exit_code, told in done.output, (tmp_path / "r").exists()) == (2, True, False), done.output
