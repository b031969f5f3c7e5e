"""Tokenizers that others have made: what is left on in their files, and which tokens stand around a document."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from opsd.trainer.data.shards import DOCUMENT, TOKENIZER, DataError, Framing, read_index
from opsd.trainer.data.tokenize import framing_of, load_tokenizer, make_corpus, train_tokenizer
from opsd.trainer.hf.export import _write_tokenizer

TEXTS = ["the cat sat on the mat and größer things " * 9, "a dog and a cat"]


def made(folder: Path, *special: str, bos: str = "", eos: str = "") -> Tokenizer:
    """A byte-level tokenizer with ``special`` tokens that puts ``bos`` and ``eos`` around a text, in ``folder``."""
    tokenizer = train_tokenizer(TEXTS, 280)
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
    plain = train_tokenizer(TEXTS, 280)
    make_corpus(TEXTS, plain, tmp_path / "plain", 10**6)
    assert callable(leave_on)
    leave_on(plain)
    plain.save(str(tmp_path / TOKENIZER))
    make_corpus(TEXTS, load_tokenizer(tmp_path / TOKENIZER), tmp_path / "mine", 10**6)
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
    index = make_corpus(TEXTS, load_tokenizer(tmp_path / TOKENIZER), tmp_path / "corpus", 10**6)
    bos, eos = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    expected = [id_ for text in TEXTS for id_ in (*tokenizer.encode(text).ids, eos)]
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
