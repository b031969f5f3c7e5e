"""Tokenizers compared: figures that equal a count by other means, in four languages and three kinds of tokenizers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from opsd.commands.main import cli
from opsd.data.tokenizers import figures, has_words
from opsd.trainer.data.tokenize import train_tokenizer

TEXTS = {
    "en": [
        "The quick brown fox jumps over the lazy dog.\n\nIt does so  every day, doesn't it?",
        "Tokenizers split words.",
    ],
    "de": ["Fünf übergroße Donaudampfschifffahrtsgesellschaften fahren über den Äquator.", "Straße, Öl und Ärger."],
    "ru": ["Съешь ещё этих мягких французских булок, да выпей чаю.", "Быстрая лиса прыгает."],
    "zh": ["今天天气很好，我们去公园散步。", "机器学习模型需要大量的数据 GPU。"],
}
ALL = [text for texts in TEXTS.values() for text in texts]


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(ALL[:4], trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]"]))
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(
        ALL, trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"])
    )
    return tokenizer


@pytest.mark.parametrize("language", TEXTS)
@pytest.mark.parametrize(
    "make", [lambda: train_tokenizer(ALL[:3], 300), word_piece, unigram], ids=["bpe", "piece", "unigram"]
)
def test_figures_equal_an_independent_count(language: str, make: object) -> None:
    """Character by character: which tokens touch which words."""
    tokenizer, texts = make(), TEXTS[language]  # type: ignore[operator]
    found = figures(tokenizer, texts)
    tokens, touching = 0, []
    for text in texts:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        tokens += len(encoding.tokens)
        owners = [set(range(begin, end)) for begin, end in encoding.offsets]
        at = 0
        for word in text.split():
            at = text.index(word, at)
            touching.append(sum(bool(owner & set(range(at, at + len(word)))) for owner in owners))
            at += len(word)
    assert found.tokens == tokens
    assert found.bytes_per_token == pytest.approx(sum(len(text.encode()) for text in texts) / tokens)
    if language == "zh":
        assert (found.words, found.fertility, found.continued) == (None, None, None)
        return
    assert found.words == len(touching)
    assert found.fertility == pytest.approx(sum(touching) / len(touching))
    assert found.continued == pytest.approx(sum(number > 1 for number in touching) / len(touching))


def test_a_byte_level_tokenizer_returns_every_text() -> None:
    """One that leaves out what it does not know returns none, and each word alone has as many tokens as in its text."""
    tokenizer = train_tokenizer(ALL, 400)
    assert {figures(tokenizer, texts).round_trip for texts in TEXTS.values()} == {1.0}
    assert figures(word_piece(), TEXTS["ru"]).round_trip == 0.0
    text = " ".join(TEXTS["de"][0].split())
    pieces = [tokenizer.encode(" " * (number > 0) + word).tokens for number, word in enumerate(text.split())]
    alone = [sum(piece != "Ġ" for piece in each) for each in pieces]
    assert figures(tokenizer, [text]).fertility == pytest.approx(sum(alone) / len(alone))


def test_words_are_counted_where_spaces_are() -> None:
    """Thai and Japanese have none; Korean has."""
    assert [has_words([text]) for text in ("สวัสดีชาวโลก", "東京タワーに行く", "안녕하세요 세계", "GPU 今 node")] == [
        False,
        False,
        True,
        True,
    ]


def test_the_command_compares_and_prices(tmp_path: Path) -> None:
    """A table, JSON and a chart; the smaller vocabulary needs more tokens for the same text."""
    for name, ids in (("small", 300), ("large", 500)):
        train_tokenizer(ALL, ids).save(str(tmp_path / f"{name}.json"))
    words = ["data", "tokenizers", str(tmp_path / "small.json"), str(tmp_path / "large.json")]
    for language, texts in TEXTS.items():
        (tmp_path / f"{language}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        words += ["--sample", f"{language}={tmp_path / language}.jsonl"]
    chart, out = tmp_path / "chart.svg", tmp_path / "out.json"
    done = CliRunner().invoke(
        cli, [*words, "--model", "tiny", "--gpus", "8", "--chart", str(chart), "--json", str(out)]
    )
    assert done.exit_code == 0, done.output
    small, large = json.loads(out.read_text())
    assert small["languages"]["zh"]["fertility"] is None
    assert small["ids"] < large["ids"]
    assert small["cost"]["embeddings"] < large["cost"]["embeddings"]
    assert small["cost"]["tokens"] > large["cost"]["tokens"]
    assert 'class="chart"' in chart.read_text()
    assert "zh" in done.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["none.json", "--sample", "en=SAMPLE"], "is not a tokenizer"),
        (["TOKENIZER", "UNIGRAM", "--sample", "en=SAMPLE"], "u.json cannot encode a document"),
        (["TOKENIZER", "--sample", "en=SAMPLE", "--sample", "en=SAMPLE"], "names a language twice"),
        (["TOKENIZER", "--sample", "SAMPLE"], "expected LANGUAGE=PATH"),
        (["TOKENIZER", "--sample", "en=none.txt"], "does not exist"),
        (["TOKENIZER", "--sample", "en=SAMPLE", "--bytes", "3"], "give a larger --bytes"),
        (["TOKENIZER", "--sample", "en=SAMPLE", "--model", "none"], "none"),
    ],
)
def test_what_cannot_be_compared_is_told(tmp_path: Path, words: list[str], told: str) -> None:
    """In a sentence, with exit code 2."""
    train_tokenizer(ALL, 300).save(str(tmp_path / "t.json"))
    Tokenizer(models.Unigram([("a", -1.0)])).save(str(tmp_path / "u.json"))
    (tmp_path / "s.txt").write_text("some text")
    files = {"SAMPLE": "s.txt", "TOKENIZER": "t.json", "UNIGRAM": "u.json"}
    given = [re.sub("[A-Z]{5,}", lambda found: str(tmp_path / files[found[0]]), word) for word in words]
    done = CliRunner().invoke(cli, ["data", "tokenizers", *given])
    assert done.exit_code == 2
    assert told in done.output + str(done.exception)
