"""``opsd audit batches`` on dumps of anybody's loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from opsd.commands.main import cli
from tests.fakes.posttrain import Writer, byte_tokenizer, tiny_llama

pytestmark = pytest.mark.slow


def collated(rows: list[dict[str, Any]], *, system: bool) -> dict[str, torch.Tensor]:
    tokenizer = byte_tokenizer()
    messages = [row["messages"] if system else row["messages"][1:] for row in rows]
    ids = [torch.tensor(tokenizer.apply_chat_template(each, return_dict=False)) for each in messages]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in ids], batch_first=True)
    return {"input_ids": padded, "attention_mask": mask, "labels": padded.masked_fill(mask == 0, -100)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer, a model, and eight rows in two batches: sound ones, and without their system prompts."""
    writer = Writer()
    rows = [{"messages": writer.chat()} for _ in range(8)]
    byte_tokenizer().save_pretrained(tmp_path / "model")
    tiny_llama().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, system in (("sound", True), ("stripped", False)):
        batches = [collated(rows[:4], system=system), collated(rows[4:], system=system)]
        torch.save(batches, tmp_path / f"{name}.pt")
        tensors = {f"{at}.{key}": value for at, batch in enumerate(batches) for key, value in batch.items()}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    both = torch.cat([collated(rows[:1], system=True)["input_ids"], collated(rows[1:2], system=True)["input_ids"]], 1)
    length = collated(rows[:1], system=True)["input_ids"].shape[1]
    positions = torch.cat([torch.arange(length), torch.arange(both.shape[1] - length)])[None]
    packed = {"input_ids": both, "labels": both, "position_ids": positions}
    torch.save({**packed, "attention_mask": torch.ones_like(both)}, tmp_path / "leaking.pt")
    torch.save(packed, tmp_path / "packed.pt")
    return tmp_path


def ran(folder: Path, file: str, *more: str) -> tuple[int, str]:
    words = ["audit", "batches", str(folder / file), "--rows", str(folder / "rows.jsonl")]
    result = CliRunner().invoke(cli, [*words, "--tokenizer", str(folder / "model"), *more], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_a_dump_is_compared_with_its_rows(folder: Path, kind: str) -> None:
    """Sound batches pass; stripped ones are named with the row, for scripts as well."""
    assert ran(folder, f"sound.{kind}")[0] == 0
    code, said = ran(folder, f"stripped.{kind}")
    assert code == 1
    assert "system_lost: The system prompt of row 0" in said
    code, said = ran(folder, f"stripped.{kind}", "--json")
    assert [each["kind"] for each in json.loads(said)["findings"]] == ["system_lost"]


def test_packing_is_measured_in_a_model(folder: Path) -> None:
    """The same tokens: position_ids alone are boundaries for the model, a mask beside them hides them."""
    model = str(folder / "model")
    assert ran(folder, "packed.pt", "--model", model)[0] == 0
    code, said = ran(folder, "leaking.pt", "--model", model)
    assert code == 1
    assert "packing_leaks" in said


def test_evaluation_rows_that_are_trained(folder: Path) -> None:
    """The rows themselves as an evaluation set."""
    code, said = ran(folder, "sound.pt", "--evaluation", str(folder / "rows.jsonl"))
    assert code == 1
    assert "8 of 8 evaluation rows are in the training data" in said


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.pt", b"no batch"),
        ("a.safetensors", b"no batch"),
        ("a.pt", b""),
        ("rows.jsonl", b'{"messages": [\n'),
        ("rows.jsonl", b"\xff\n"),
    ],
)
def test_files_that_are_none(folder: Path, name: str, content: bytes) -> None:
    """One sentence that names the file, and code 2."""
    (folder / name).write_bytes(content)
    words = ["audit", "batches", str(folder / (name if name != "rows.jsonl" else "sound.pt"))]
    words += ["--rows", str(folder / "rows.jsonl"), "--tokenizer", str(folder / "model")]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2
    assert str(folder / name) in result.output.replace("\n", "")
    assert "Traceback" not in result.output
