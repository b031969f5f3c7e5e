"""The pipeline of examples/ on text that is made here, in the environment of ``make data``."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest

from opsd.data.status import status
from opsd.trainer.data.shards import read_index
from opsd.trainer.data.sources import open_sources
from opsd.trainer.data.tokenize import train_tokenizer
from opsd.trainer.data_settings import DataSettings, StageSettings
from tests.fakes.tree import ROOT

PYTHON = ROOT / ".venv-data/bin/python"
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="no environment of `make data`"),
]
ENGLISH = [
    "the",
    "of",
    "and",
    "to",
    "that",
    "with",
    "have",
    "be",
    "water",
    "people",
    "small",
    "house",
    "river",
    "light",
    "garden",
    "morning",
    "work",
    "music",
    "story",
]
GERMAN = [
    "der",
    "die",
    "und",
    "nicht",
    "mit",
    "sein",
    "haben",
    "wasser",
    "leute",
    "kleine",
    "haus",
    "fluss",
    "licht",
    "garten",
    "morgen",
    "arbeit",
    "musik",
    "geschichte",
]
IDENTIFY = """
import fasttext
model = fasttext.train_supervised("lid.txt", minn=2, maxn=4, epoch=20, dim=8, bucket=20000, thread=1, verbose=0)
model.save_model("lid.176.bin")
"""


def text(rng: random.Random, words: list[str], count: int = 120) -> str:
    return " ".join(rng.choices(words, k=count)) + "."


def test_every_filter_drops_what_was_planted_for_it(tmp_path: Path) -> None:
    """Other languages, bad texts, copies and near copies. The corpora that are left serve a mixture in three stages."""
    rng = random.Random(11)
    lines = [f"__label__en {text(rng, ENGLISH, 12)}\n__label__de {text(rng, GERMAN, 12)}\n" for _ in range(300)]
    (tmp_path / "lid.txt").write_text("".join(lines))
    subprocess.run([PYTHON, "-c", IDENTIFY], cwd=tmp_path, check=True)
    for source in ("web", "books"):
        good = [text(rng, ENGLISH) for _ in range(60)]
        near = [each.replace(each.split()[60], "stone", 1) for each in good[:10]]
        texts = [
            *good,
            *good[10:30],
            *near,
            *(text(rng, GERMAN) for _ in range(15)),
            *(text(rng, ENGLISH, 9) for _ in range(5)),
        ]
        rng.shuffle(texts)
        (tmp_path / "raw" / source).mkdir(parents=True)
        for number in range(6):
            part = (
                json.dumps({"text": each, "id": f"{source}-{number}-{at}"}) + "\n"
                for at, each in enumerate(texts[number::6])
            )
            (tmp_path / "raw" / source / f"{number}.jsonl").write_text("".join(part))
    train_tokenizer([text(rng, ENGLISH) for _ in range(50)], 300).save(str(tmp_path / "tokenizer.json"))

    words = [PYTHON, "-m", "opsd", "data", "run", ROOT / "examples/data_pipeline.py", "--dir", "state", "--local"]
    environment = {"PATH": "/usr/bin:/bin", "HF_HOME": str(tmp_path / "hf"), "HOME": str(tmp_path)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    stages = status(tmp_path / "state")["stages"]
    for first in (0, 9):
        flows = {flow["step"]: flow["documents"] for stage in stages[first : first + 9] for flow in stage["flows"]}
        assert flows["LanguageFilter"]["dropped"] == 15
        assert flows["GopherQualityFilter"]["dropped"] == 5
        assert flows["ExactDedupFilter"]["dropped"] == 20
        assert 8 <= flows["MinhashDedupFilter"]["dropped"] <= 12
        assert flows["ShardWriter"]["in"] == 70 - flows["MinhashDedupFilter"]["dropped"]
    mixture = [(1, 0.8, 0.2), (8001, 0.6, 0.4), (9501, 0.3, 0.7)]
    settings = DataSettings(
        shards=str(tmp_path / "shards"), sequence=64, batch=4, micro_batch=2,
        stages=tuple(StageSettings(start=at, weights={"web": web, "books": books}) for at, web, books in mixture),
    )  # fmt: skip
    assert sorted(open_sources(settings, 300)) == ["books", "web"]
    documents = sum(shard.documents for shard in read_index(tmp_path / "shards/web").shards)
    assert documents == next(f["documents"]["in"] for f in stages[7]["flows"] if f["step"] == "ShardWriter")
    again = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert again.stderr == ""
