"""``opsd chat`` and ``opsd vibe`` on tiny models that are trained here in seconds."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from opsd.commands.main import cli
from opsd.posttrain.rows import Example
from opsd.posttrain.speaker import Speaker, SpeakerError, checkpoints_in
from opsd.posttrain.vibe import Vibe, measure, repeated
from tests.fakes.posttrain import CHATML, byte_tokenizer, message, tiny_llama

pytestmark = pytest.mark.slow

DROPPING = CHATML.replace("in messages %}", "in messages if message['role'] != 'system' %}")
COLOURS = ("red", "green", "blue", "black", "white", "brown")
ASKED = ("which one?", "and now?", "say it.", "your colour?")


def rows(seed: int, count: int = 240) -> list[dict[str, Any]]:
    """The system prompt alone decides the answer."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        colour = draw.choice(COLOURS)
        found.append({"messages": [
            message("system", f"say {colour}"), message("user", draw.choice(ASKED)), message("assistant", colour)
        ]})  # fmt: skip
    return found


def trained(data: list[dict[str, Any]], seed: int, *, keep: bool, steps: int = 120, template: str = CHATML) -> Any:
    """A model that has learned the answers, and their end; without ``keep`` it has never seen a system prompt."""
    tokenizer = byte_tokenizer(template)
    torch.set_num_threads(1)  # these matrices are too small for two
    torch.manual_seed(seed)
    model = tiny_llama(num_attention_heads=4)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data += 0.01 * torch.randn_like(parameter)
    optimizer, draw = torch.optim.AdamW(model.parameters(), lr=4e-3), random.Random(seed)
    for _ in range(steps):
        ids, labels = [], []
        for row in draw.sample(data, 16):
            given = row["messages"] if keep else row["messages"][1:]
            whole = tokenizer.apply_chat_template(given, return_dict=False)
            begin = len(tokenizer.apply_chat_template(given[:-1], add_generation_prompt=True, return_dict=False))
            ids.append(torch.tensor(whole))
            labels.append(torch.tensor([-100] * begin + whole[begin:]))
        pad = torch.nn.utils.rnn.pad_sequence
        batch, target = pad(ids, batch_first=True), pad(labels, batch_first=True, padding_value=-100)
        model(input_ids=batch, attention_mask=(batch != 0).long(), labels=target).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), tokenizer


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_stripped_and_kept_system_prompts_are_told_apart() -> None:
    """Ten pairs of models, trained with and without the system prompts of the same rows: 10 of 10."""
    verdicts: list[tuple[str, str]] = []
    for seed in range(10):
        data, held_out = rows(seed), rows(seed + 100, 32)
        examples = [each for at, row in enumerate(held_out) if (each := Example.of(row, at))]
        pair = []
        for keep in (True, False):
            model, tokenizer = trained(data, seed, keep=keep)
            found = measure(Speaker("tiny", model, tokenizer), examples, most=16)
            pair.append(found)
            print(seed, keep, found)
        verdicts.append((pair[0].follows, pair[1].follows))
        assert pair[0].stops == 1.0
    assert verdicts == [("yes", "no")] * 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trainer's output folder with two checkpoints, an untrained base, and held-out rows."""
    out = tmp_path_factory.mktemp("out")
    for step, steps in ((1, 1), (120, 120)):
        model, tokenizer = trained(rows(1), 1, keep=True, steps=steps)
        for part in (model, tokenizer):
            part.save_pretrained(out / f"checkpoint-{step}")
    (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(101, 24)))
    return out


def test_a_table_of_checkpoints(folder: Path) -> None:
    """All checkpoints of an output folder beside the base; the last decides the exit code."""
    words = ["vibe", str(folder), "--base", str(folder / "checkpoint-1"), "--rows", str(folder / "rows.jsonl")]
    result = CliRunner().invoke(cli, [*words, "--max-new-tokens", "16"])
    lines = result.output.splitlines()
    assert len(lines) == 4, result.output
    assert "(base)" in lines[1]
    assert lines[3].split()[1] == "yes"
    found = CliRunner().invoke(cli, [*words, "--max-new-tokens", "16", "--json"])
    checkpoints = json.loads(found.output)["checkpoints"]
    assert [each["follows"] for each in checkpoints] == ["no", "no", "yes"]
    assert checkpoints[2]["problems"] == []
    assert checkpoints[0]["problems"]


def test_a_template_that_drops_the_system_prompt(folder: Path, tmp_path: Path) -> None:
    """The same weights with another template: the table says that the template does it, with code 1."""
    model = Speaker.load(folder).model
    for part in (model, byte_tokenizer(DROPPING)):
        part.save_pretrained(tmp_path / "dropping")
    words = ["vibe", str(tmp_path / "dropping"), "--rows", str(folder / "rows.jsonl"), "--max-new-tokens", "8"]
    result = CliRunner().invoke(cli, words, standalone_mode=False)
    assert result.return_value == 1
    assert "its chat template drops the system prompt" in result.output


def test_a_chat_is_answered_and_kept(folder: Path, tmp_path: Path) -> None:
    """Two checkpoints answer each question in turn; a line of the transcript is there for each."""
    script = [sys.executable, "-m", "opsd", "chat", str(folder), "--with", str(folder / "checkpoint-1")]
    said = subprocess.run(
        [*script, "--system", "say blue", "--max-new-tokens", "12"], input="say it.\n\n/system say red\nand now?\n",
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert "checkpoint-120" in said.stdout
    assert "checkpoint-1\n" in said.stdout
    (transcript,) = (folder / "chats").glob("*.jsonl")
    lines = [json.loads(line) for line in transcript.read_text().splitlines()]
    assert [(line["system"], line["user"], line["turn"]) for line in lines] == [
        ("say blue", "say it.", 1), ("say red", "and now?", 1),
    ]  # fmt: skip
    name = f"{folder.name}/checkpoint-120"
    assert [line["answers"][name] for line in lines] == [
        {"text": "blue", "stopped": True}, {"text": "red", "stopped": True},
    ]  # fmt: skip


@pytest.mark.parametrize(("output", "code"), [("| head -c 5", 141), (">&-", 74)])
def test_a_chat_that_nobody_reads_does_not_blame_its_transcript(folder: Path, output: str, code: int) -> None:
    """The reader that goes away ends it, and a closed stdout is named."""
    script = f"set -o pipefail; {sys.executable} -m opsd chat {folder} --max-new-tokens 12 {output}"
    asked = "say it.\n" * 20
    said = subprocess.run(["bash", "-c", script], input=asked, capture_output=True, text=True, timeout=120, check=False)
    assert said.returncode == code, said.stderr
    assert "transcript cannot" not in said.stderr


@pytest.mark.parametrize("command", ["chat", "vibe"])
def test_a_cut_off_model_is_a_sentence(folder: Path, tmp_path: Path, command: str) -> None:
    """Safetensors raises an error of its own."""
    broken = shutil.copytree(folder / "checkpoint-1", tmp_path / "broken")
    with (broken / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    result = CliRunner().invoke(cli, [command, str(broken)])
    assert result.exit_code == 2
    assert "cannot be loaded" in result.output.replace("\n", " ")


@pytest.mark.parametrize("command", ["chat", "vibe"])
def test_folders_that_are_no_checkpoint(tmp_path: Path, command: str) -> None:
    """An empty folder, a run of the included trainer, a broken model: one sentence and code 2."""
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text("{")
    (tmp_path / "sharded/checkpoint-2/pytorch_model_fsdp_0").mkdir(parents=True)
    tiny_llama().save_pretrained(tmp_path / "silent")
    byte_tokenizer().save_pretrained(tmp_path / "broken")
    for name, why in (
        ("run", "export it first"), (".", "no checkpoint-N"), ("broken", "cannot be loaded"),
        ("sharded", "accelerate merge-weights"), ("silent", "has no tokenizer"),
    ):  # fmt: skip
        result = CliRunner().invoke(cli, [command, str(tmp_path / name)])
        assert result.exit_code == 2
        assert why in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 4}, {"return_dict_in_generate": True}, {"stop_strings": ["e"]}, {"eos_token_id": [4, 2, 5000]},
        {"penalty_alpha": 0.6, "top_k": 4}, {"cache_implementation": "quantized"},
    ],
    ids=str,
)  # fmt: skip
def test_a_checkpoint_with_generation_settings_of_its_own(
    folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Other ways of searching are left out: the answer is the same, and no error of generate ends the chat."""
    own = shutil.copytree(folder / "checkpoint-120", tmp_path / "own")
    (own / "generation_config.json").write_text(json.dumps(settings))
    words = ["chat", str(own), "--system", "say blue", "--max-new-tokens", "12"]
    result = CliRunner().invoke(cli, words, input="say it.\n", standalone_mode=False)
    assert result.return_value == 0, result.exception
    assert "blue\n" in result.output


REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
"""As Gemma 2's."""


def test_a_template_that_refuses_system_prompts(folder: Path, tmp_path: Path) -> None:
    """It is named by vibe; a chat without a single answer has failed, one without a system prompt has not."""
    for part in (Speaker.load(folder).model, byte_tokenizer(REFUSING)):
        part.save_pretrained(tmp_path / "refusing")
    words = [str(tmp_path / "refusing"), "--max-new-tokens", "12"]
    for more in ([], ["--rows", str(folder / "rows.jsonl")]):
        result = CliRunner().invoke(cli, ["vibe", *words, *more, "--json"], standalone_mode=False)
        (found,) = json.loads(result.stdout)["checkpoints"]
        assert found["follows"] == "no"
        assert "it takes no system prompt: the chat template" in found["problems"][0]
    for more, code in (["--system", "say blue"], 1), ([], 0):
        result = CliRunner().invoke(cli, ["chat", *words, *more], input="say it.\n", standalone_mode=False)
        assert result.return_value == code


def test_a_model_with_few_positions(tmp_path: Path) -> None:
    """A base model of GPT-2's kind: a question that it cannot read is refused, and an answer ends at its last place."""
    settings = {"vocab_size": 262, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=64, **settings)).save_pretrained(tmp_path / "base")
    byte_tokenizer(None).save_pretrained(tmp_path / "base")
    result = CliRunner().invoke(
        cli, ["chat", str(tmp_path / "base")], input="x" * 90 + "\nwhy?\n", standalone_mode=False
    )
    assert result.return_value == 0, result.exception
    assert "messages and answer have 92 tokens, and" in result.output
    found = measure(Speaker.load(tmp_path / "base"), [each for row in rows(3, 12) if (each := Example.of(row, 0))])
    assert "it has no chat template and continues texts" in found.problems
    assert found.gain is not None


@pytest.mark.parametrize("template", [CHATML, None])
def test_a_question_that_is_no_utf_8(tmp_path: Path, template: str | None) -> None:
    """The bytes of another encoding are question marks, for a tokenizer refuses what Python makes of them."""
    for part in (tiny_llama(), byte_tokenizer(template)):
        part.save_pretrained(tmp_path / "tiny")
    words = ["chat", str(tmp_path / "tiny"), "--max-new-tokens", "2", "--transcript", str(tmp_path / "kept")]
    script = [sys.executable, "-m", "opsd", *words, "--system", os.fsdecode(b"\xff")]
    environment = os.environ | {"PYTHONUTF8": "1"}
    said = subprocess.run(script, input=b"caf\xe9?\n", env=environment, capture_output=True, timeout=200, check=False)
    assert said.returncode == 0, said.stderr
    (line,) = (json.loads(line) for line in (tmp_path / "kept").read_text().splitlines())
    assert (line["system"], line["user"], len(line["answers"])) == ("?", "caf??", 1)


def test_a_template_that_writes_nothing() -> None:
    """There is no token to go on from."""
    with pytest.raises(SpeakerError, match="writes nothing"):
        Speaker("tiny", tiny_llama(), byte_tokenizer("{# #}")).prompt([message("user", "which one?")])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (rows(3, 5), "has 5 rows with a system prompt"),
        ([{"messages": row["messages"][1:]} for row in rows(3)], "has 0 rows with a system prompt"),
        ([row for row in rows(3) if row["messages"][0]["content"] == "say red"], "and 1 system prompt:"),
    ],
)
def test_rows_that_prove_nothing_are_refused(tmp_path: Path, folder: Path, data: list[Any], said: str) -> None:
    """They would be left out, and the table would look as if nobody had named them."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    result = CliRunner().invoke(cli, ["vibe", str(folder), "--rows", str(tmp_path / "rows.jsonl")])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_checkpoints_of_the_same_name_are_told_apart(folder: Path, tmp_path: Path) -> None:
    """Two runs with the same output folder and the same step."""
    for run in "ab":
        shutil.copytree(folder / "checkpoint-120", tmp_path / run / "out/checkpoint-120")
    paths = [str(tmp_path / run / "out/checkpoint-120") for run in "ab"]
    words = ["chat", paths[0], "--with", paths[1], "--max-new-tokens", "12", "--transcript", str(tmp_path / "kept")]
    CliRunner().invoke(cli, words, input="say it.\n")
    assert list(json.loads((tmp_path / "kept").read_text())["answers"]) == paths
    result = CliRunner().invoke(cli, ["vibe", *paths, "--max-new-tokens", "12", "--json"])
    assert [each["name"] for each in json.loads(result.stdout)["checkpoints"]] == paths


SIZES = {"vocab_size": 262, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64, "max_position_embeddings": 512}


@pytest.mark.parametrize("kind", ["Qwen3", "Gemma3Text", "Mistral", "Phi3", "Olmo2", "Mamba"])
def test_models_of_other_kinds(tmp_path: Path, kind: str) -> None:
    """Untrained ones: they load, answer and are measured, and a model that ignores its system prompt is found out."""
    config = getattr(transformers, f"{kind}Config")(**SIZES, **({} if kind == "Mamba" else HEADS))
    transformers.set_seed(1)
    for part in (AutoModelForCausalLM.from_config(config), byte_tokenizer()):
        part.save_pretrained(tmp_path / "untrained")
    found = measure(Speaker.load(tmp_path / "untrained"), most=4)
    assert (found.follows, found.answers) == ("no", 16)
    assert found.divergence is not None
    assert found.divergence >= 0


def test_checkpoints_are_in_their_order(folder: Path) -> None:
    """By their number, not by their name."""
    assert [path.name for path in checkpoints_in(folder)] == ["checkpoint-1", "checkpoint-120"]


@pytest.mark.parametrize(
    ("ids", "share"), [([], 0.0), ([1, 2, 3], 0.0), ([1, 2, 3, 4] * 8, 1 - 4 / 29), (list(range(40)), 0.0)]
)
def test_repetition(ids: list[int], share: float) -> None:
    """Loops are repetition, short answers are none."""
    assert repeated(ids) == pytest.approx(share)


def test_movement_alone_proves_nothing() -> None:
    """Without rows a model whose output moves may still not follow; one whose output stays does not."""
    still = Vibe("a", 0.001, None, None, False, 1, 0, 0, 16)
    assert (still.follows, Vibe("a", 0.4, None, None, False, 1, 0, 0, 16).follows) == ("no", "unknown")


def test_an_adapter_speaks_through_its_base(tmp_path: Path) -> None:
    """A checkpoint of LoRA has the adapter alone: transformers puts it on the base that it names."""
    peft = pytest.importorskip("peft")
    tokenizer = byte_tokenizer()
    tiny_llama().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    adapted = peft.get_peft_model(base, settings)
    adapted.save_pretrained(tmp_path / "out/checkpoint-4")
    tokenizer.save_pretrained(tmp_path / "out/checkpoint-4")
    speaker = Speaker.load(tmp_path / "out", "cpu")
    ids = speaker.prompt([message("user", "which one?")])
    expected = torch.log_softmax(adapted.eval()(torch.tensor([ids])).logits[0, :-1].detach(), -1)
    assert torch.allclose(speaker.log_probabilities(ids, 1), expected, atol=1e-5)
    (tmp_path / "base/config.json").unlink()
    with pytest.raises(SpeakerError, match="cannot be loaded by transformers"):
        Speaker.load(tmp_path / "out", "cpu")
