"""The audit of first batches in TRL's own trainers: planted faults are refused before step 1, sound data are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

trl = pytest.importorskip("trl", reason="trl is not installed")

import datasets  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from tokenizers import processors  # noqa: E402

from opsd.adapters.first_batches import AuditRefusedError, audit_of  # noqa: E402
from opsd.adapters.huggingface import RankPageCallback  # noqa: E402
from opsd.client import Reporter  # noqa: E402
from tests.fakes.posttrain import CHATML, TRAINED, Writer, byte_tokenizer, message, tiny_llama  # noqa: E402

pytestmark = pytest.mark.slow  # the libraries alone take seconds to import

SETTINGS: dict[str, Any] = {
    "max_steps": 1, "per_device_train_batch_size": 4, "save_strategy": "no", "report_to": [], "use_cpu": True,
    "bf16": False, "disable_tqdm": True, "gradient_checkpointing": False, "output_dir": "out",
}  # fmt: skip
Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.disable_progress_bars()
    monkeypatch.chdir(tmp_path)


def sft(
    rows: Rows, tokenizer: Any = None, *, model: Any = None, evaluation: Rows | None = None, **settings: Any
) -> Any:
    extra = {name: settings.pop(name) for name in ("data_collator", "formatting_func") if name in settings}
    return trl.SFTTrainer(
        model or tiny_llama(), args=trl.SFTConfig(**{**SETTINGS, **settings}),
        processing_class=tokenizer or byte_tokenizer(),
        train_dataset=datasets.Dataset.from_list(rows),
        eval_dataset=datasets.Dataset.from_list(evaluation) if evaluation else None, **extra,
    )  # fmt: skip


def dpo(rows: Rows, tokenizer: Any = None, **settings: Any) -> Any:
    return trl.DPOTrainer(
        tiny_llama(), ref_model=tiny_llama(), args=trl.DPOConfig(**{**SETTINGS, **settings}),
        processing_class=tokenizer or byte_tokenizer(), train_dataset=datasets.Dataset.from_list(rows),
    )  # fmt: skip


def kto(rows: Rows, tokenizer: Any = None, **settings: Any) -> Any:
    return trl.KTOTrainer(
        tiny_llama(), ref_model=tiny_llama(), args=trl.KTOConfig(**{**SETTINGS, **settings}),
        processing_class=tokenizer or byte_tokenizer(), train_dataset=datasets.Dataset.from_list(rows),
    )  # fmt: skip


def grpo(rows: Rows, tokenizer: Any = None, **settings: Any) -> Any:
    arguments = {**SETTINGS, "num_generations": 4, "max_completion_length": 4, **settings}
    return trl.GRPOTrainer(
        tiny_llama(), args=trl.GRPOConfig(**arguments), processing_class=tokenizer or byte_tokenizer(),
        train_dataset=datasets.Dataset.from_list(rows),
        reward_funcs=lambda completions, **_: [0.5] * len(completions),
    )  # fmt: skip


def chats(count: int = 24, turns: int = 1, *, system: bool = True) -> Rows:
    writer = Writer(count)
    return [{"messages": writer.chat(turns, system=system)} for _ in range(count)]


def completions(count: int = 24, *, system: bool = True, **more: Any) -> Rows:
    writer = Writer(count)
    return [
        {"prompt": writer.chat(system=system)[:-1], "completion": [message("assistant", writer.answer())], **more}
        for _ in range(count)
    ]


def pairs(count: int = 24) -> Rows:
    writer = Writer(count)
    return [
        {
            "prompt": writer.chat()[:-1],
            "chosen": [message("assistant", writer.answer())],
            "rejected": [message("assistant", writer.answer())],
        }
        for _ in range(count)
    ]


# -- faults ------------------------------------------------------------------------------------------------------------

NO_SYSTEM = CHATML.replace(
    "{% for message in messages %}", "{% for message in messages if message['role'] != 'system' %}"
)
NO_END = CHATML.replace("<|im_end|>", "")
LAST_TURNS = CHATML.replace("in messages %}", "in messages[-2:] %}")


def copied_labels(features: Rows) -> dict[str, torch.Tensor]:
    """A collator that trains all."""
    ids = [torch.tensor(row["input_ids"]) for row in features]
    batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in ids], batch_first=True)
    return {"input_ids": batch, "attention_mask": mask, "labels": batch.masked_fill(mask == 0, -100)}


def shifted_labels(features: Rows) -> dict[str, torch.Tensor]:
    batch = copied_labels(features)
    return {**batch, "labels": torch.cat([batch["labels"][:, 1:], torch.full((len(features), 1), -100)], 1)}


def system_labels(features: Rows) -> dict[str, torch.Tensor]:
    """A collator that leaves out the user, and trains the system prompt up to its ``<|im_end|>``."""
    batch = copied_labels(features)
    for labels, row in zip(batch["labels"], features, strict=True):
        end = row["input_ids"].index(2)
        for at, label in enumerate(row["labels"]):
            labels[at] = labels[at] if label != -100 or at < end else -100
    return batch


def with_words_of_the_system(rows: Rows) -> Rows:
    for row in rows:
        system, user = row["messages"][:2]
        user["content"] = f"{user['content']} {system['content']}"
    return rows


def as_completions(rows: Rows) -> Rows:
    return [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]


def marker_not_found(features: Rows) -> dict[str, torch.Tensor]:
    batch = copied_labels(features)
    return {**batch, "labels": torch.full_like(batch["labels"], -100)}


def one_long_row(features: Rows) -> dict[str, torch.Tensor]:
    """A packing of one's own that tells the model of no boundaries but their positions, which its mask overrules."""
    ids = [torch.tensor(row["input_ids"]) for row in features]
    joined = torch.cat(ids)[None]
    positions = torch.cat([torch.arange(len(each)) for each in ids])[None]
    return {
        "input_ids": joined, "labels": joined.clone(), "position_ids": positions,
        "attention_mask": torch.ones_like(joined),
    }  # fmt: skip


def without_positions(features: Rows) -> dict[str, torch.Tensor]:
    batch = one_long_row(features)
    del batch["position_ids"]
    return batch


def pad_is_eos() -> Any:
    tokenizer = byte_tokenizer(pad_token="<|im_end|>")
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return sft(
        [{"text": Writer(at).answer()} for at in range(24)], tokenizer,
        data_collator=lambda features: collator([{"input_ids": row["input_ids"]} for row in features]),
    )  # fmt: skip


def two_beginnings(between: str = "") -> Any:
    tokenizer = byte_tokenizer(f"<s>{between}{CHATML}")
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    rows = [
        {"text": between + tokenizer.apply_chat_template(row["messages"], tokenize=False), "messages": row["messages"]}
        for row in chats()
    ]
    return sft([{"text": row["text"]} for row in rows], tokenizer)


def formatted_without_system() -> Any:
    tokenizer = byte_tokenizer()
    rows = chats()
    ids = [tokenizer.apply_chat_template(row["messages"][1:], return_dict=False) for row in rows]
    return sft([{**row, "input_ids": each} for row, each in zip(rows, ids, strict=True)], tokenizer)


def other_prompts() -> Rows:
    writer = Writer(3)
    given = [message("system", "Be kind to those who visit the town.")]
    return [{side: given + writer.chat(system=False) for side in ("chosen", "rejected")} for _ in range(24)]


def empty_answers() -> Any:
    tokenizer = byte_tokenizer()
    rows = []
    for at, row in enumerate(completions()):
        prompt = tokenizer.apply_chat_template(row["prompt"], return_dict=False)
        answer = [*tokenizer.encode(row["completion"][0]["content"]), 2] if at % 6 else []
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return sft(rows, tokenizer, max_length=None)  # with a limit TRL drops them itself


def equal(rows: Rows, more: str = "") -> Rows:
    same = [[{**each, "content": each["content"] + more} for each in row["chosen"]] for row in rows]
    return [{**row, "rejected": same[at]} if at % 3 == 0 else row for at, row in enumerate(rows)]


PLANTED: dict[str, tuple[str, Callable[[], Any]]] = {
    "template drops the system prompt": ("system_lost", lambda: sft(chats(), byte_tokenizer(NO_SYSTEM))),
    "formatting drops the system prompt": ("system_lost", formatted_without_system),
    "system prompt lost in rollouts": (
        "system_lost", lambda: grpo([{"prompt": row["prompt"]} for row in completions()], byte_tokenizer(NO_SYSTEM)),
    ),
    "system prompt lost in packed rows": (
        "system_lost", lambda: sft(chats(), byte_tokenizer(NO_SYSTEM), packing=True, max_length=1024)
    ),
    "system prompt lost in pairs": ("system_lost", lambda: dpo(pairs(), byte_tokenizer(NO_SYSTEM))),
    "collator trains the user's text": (
        "given_text_trained",
        lambda: sft(chats(), byte_tokenizer(TRAINED), assistant_only_loss=True, data_collator=copied_labels),
    ),
    "collator trains the prompt": ("given_text_trained", lambda: sft(completions(), data_collator=copied_labels)),
    "collator trains the system prompt": (
        "given_text_trained",
        lambda: sft(chats(), byte_tokenizer(TRAINED), assistant_only_loss=True, data_collator=system_labels),
    ),
    "template without earlier turns": (
        "turns_lost", lambda: sft(chats(turns=3, system=False), byte_tokenizer(LAST_TURNS))
    ),
    "system prompt in the user's words": (
        "system_lost", lambda: sft(with_words_of_the_system(chats()), byte_tokenizer(NO_SYSTEM))
    ),
    "padding is the end token": ("end_untrained", pad_is_eos),
    "template without end": ("end_missing", lambda: sft(chats(), byte_tokenizer(NO_END))),
    "marker not found": ("nothing_trained", lambda: sft(chats(), data_collator=marker_not_found)),
    "rows without answer": ("rows_untrained", empty_answers),
    "two BOS": ("double_bos", two_beginnings),
    "two BOS on two lines": ("double_bos", lambda: two_beginnings("\n")),
    "answers cut off": ("answers_truncated", lambda: sft(chats(), max_length=180)),
    "equal pairs": ("pairs_equal", lambda: dpo(equal(pairs()))),
    "pairs that differ in a space": ("pairs_equal", lambda: dpo(equal(pairs(), " "))),
    "different prompts": ("prompts_differ", lambda: dpo(other_prompts())),
    "evaluation in training": ("evaluation_in_training", lambda: sft(chats(), evaluation=chats()[3:9])),
    "evaluation in training, in another format": (
        "evaluation_in_training", lambda: sft(chats(), evaluation=as_completions(chats()[3:9]))
    ),
    "labels shifted": ("labels_shifted", lambda: sft(chats(), data_collator=shifted_labels)),
    "packing leaks past positions": ("packing_leaks", lambda: sft(chats(), data_collator=one_long_row)),
    "packing without boundaries": ("packing_leaks", lambda: sft(chats(), data_collator=without_positions)),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step, in a sentence, by its kind."""
    kind, make = PLANTED[name]
    trainer = make()
    monkeypatch.setenv("OPSD_AUDIT", "refuse")
    trainer.add_callback(RankPageCallback(Reporter(tmp_path / "rank.page")))
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(AuditRefusedError) as refused:
        trainer.train()
    assert trainer.state.global_step == 0
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
    assert "--audit warn" in str(refused.value)
    assert KINDS[kind] in str(refused.value)


KINDS = {
    "system_lost": "The system prompt of row", "given_text_trained": "The loss covers the",
    "end_untrained": "The end token of row", "end_missing": "There is no end token behind the answer of row",
    "turns_lost": "A question or an earlier answer of row",
    "nothing_trained": "No token of row", "rows_untrained": "is trained, as of 4 of 24 documents",
    "double_bos": "begins with two BOS tokens", "answers_truncated": "is cut off at 180 tokens, as in 24 of 24",
    "pairs_equal": "Chosen and rejected are equal in row 0",
    "prompts_differ": "answer different prompts, as in 24 of 24",
    "evaluation_in_training": "6 of 6 evaluation rows are in the training data",
    "labels_shifted": "are one token ahead",
    "packing_leaks": "see each other",
}  # fmt: skip


# -- sound data --------------------------------------------------------------------------------------------------------

TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def plain_texts(count: int = 24) -> Rows:
    writer = Writer(count)
    return [{"text": writer.answer()} for _ in range(count)]


def of_texts(count: int = 24, **more: Any) -> Rows:
    writer = Writer(count)
    return [{"prompt": writer.question(), "completion": f" {writer.answer()}", **more} for _ in range(count)]


def implicit_pairs(count: int = 24) -> Rows:
    return [
        {"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]} for row in pairs(count)
    ]


def from_values(count: int = 24) -> Rows:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    return [
        {"conversations": [{"from": names[each["role"]], "value": each["content"]} for each in row["messages"]]}
        for row in chats(count)
    ]


def with_equal_rows(rows: Rows) -> Rows:
    """Sound data may have a pair in thirty that is equal."""
    return [*rows, {**rows[0], "rejected": rows[0]["chosen"]}]


def with_long_row(rows: Rows) -> Rows:
    long = [message("user", "Tell a long story, please."), message("assistant", "and then they went on, " * 40)]
    return [*rows, {"messages": long}]


SOUND: dict[str, Callable[[], Any]] = {
    **{f"chat of {turns} turns, seed {seed}": lambda turns=turns, seed=seed: sft(chats(seed, turns), max_length=2048)
       for turns in (1, 3) for seed in (20, 21)},
    "chat without system prompts": lambda: sft(chats(system=False)),
    "chat, half with a system prompt": lambda: sft(chats(12) + chats(13, system=False)),
    "assistants only": lambda: sft(chats(turns=2), byte_tokenizer(TRAINED), assistant_only_loss=True),
    "packed": lambda: sft(chats(), packing=True, max_length=1024),
    "packed, assistants only": lambda: sft(
        chats(), byte_tokenizer(TRAINED), packing=True, max_length=1024, assistant_only_loss=True),
    "packed, cut anywhere": lambda: sft(chats(), packing=True, packing_strategy="wrapped", max_length=300),
    "packed, long ones split": lambda: sft(chats(), packing=True, packing_strategy="bfd_split", max_length=200),
    "without padding": lambda: sft(chats(), padding_free=True, max_length=None),
    "one long row": lambda: sft(with_long_row(chats()), max_length=512),
    "from and value": lambda: sft(from_values()),
    "conversational completions": lambda: sft(completions()),
    "completions, all trained": lambda: sft(completions(), completion_only_loss=False),
    "texts with completions": lambda: sft(of_texts()),
    "plain texts": lambda: sft(plain_texts()),
    "plain texts, packed": lambda: sft(plain_texts(), packing=True, max_length=256),
    "evaluated": lambda: sft(chats(24), evaluation=chats(9)),
    "a formatting function": lambda: sft(
        [{"question": "What is it?", "reply": row["text"]} for row in plain_texts()],
        formatting_func=lambda row: f"{row['question']} {row['reply']}"),
    "preferences": lambda: dpo(pairs()),
    "preferences, prompt within": lambda: dpo(implicit_pairs()),
    "preferences, one equal": lambda: dpo(with_equal_rows(pairs(30))),
    "preferences of texts": lambda: dpo(
        [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": " No idea."} for row in of_texts()]),
    "APO": lambda: dpo(pairs(21), loss_type="apo_zero"),
    "unpaired preferences": lambda: kto([{**row, "label": at % 2 == 0} for at, row in enumerate(completions())]),
    "unpaired preferences of texts": lambda: kto(
        [{**row, "label": at % 2 == 0} for at, row in enumerate(of_texts())]),
    "rollouts": lambda: grpo([{"prompt": row["prompt"]} for row in completions()]),
    "rollouts of texts": lambda: grpo([{"prompt": row["prompt"]} for row in of_texts()]),
}  # fmt: skip


@pytest.mark.long
def test_thirty_sound_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every format that TRL documents, in its own trainers: not one alarm, and each makes its step."""
    assert len(SOUND) >= 30
    monkeypatch.setenv("OPSD_AUDIT", "refuse")
    for name, make in SOUND.items():
        trainer = make()
        trainer.add_callback(RankPageCallback(Reporter(tmp_path / "rank.page")))
        try:
            trainer.train()
        except AuditRefusedError as error:
            pytest.fail(f"{name}: {error}")
        assert trainer.state.global_step == 1


WITH_PARTS = ("idefics3", "llava_next", "smolvlm")
"""Templates for content in parts; they leave out content that is a text, of which the audit tells."""
END_IS_NEXT_TURN = ("glm4moe",)
"""Templates that write no end; their models stop where the user's turn would begin."""


def in_parts(rows: Rows) -> Rows:
    return [
        {"messages": [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in row["messages"]]}
        for row in rows
    ]


@pytest.mark.long
def test_the_templates_of_trl() -> None:
    """Conversations, trained whole or for their assistant only, in each template: 0 alarms."""
    alarms, looked = [], 0
    for file in sorted(TEMPLATES.glob("*.jinja")):
        template = file.read_text()
        for system in (True, False):
            rows = chats(8, 2, system=system)
            rows = in_parts(rows) if file.name.startswith(WITH_PARTS) else rows
            end = "<|user|>" if file.name.startswith(END_IS_NEXT_TURN) else "<|im_end|>"
            tokenizer = byte_tokenizer(template, eos_token=end)
            only = "{% generation %}" in template or "{%- generation" in template
            try:
                trainer = sft(rows, tokenizer, assistant_only_loss=only, max_length=4096)
            except Exception as error:  # Gemma's
                assert system and "System role not supported" in str(error), file.name
                continue
            looked += 1
            report = audit_of(trainer, next(iter(trainer.get_train_dataloader())))
            alarms += [f"{file.name}: {finding}" for finding in report.findings]
    assert not alarms
    assert looked >= 120


def test_an_audit_changes_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights to the bit, with an audit and without."""

    def trained(mode: str) -> list[bytes]:
        monkeypatch.setenv("OPSD_AUDIT", mode)
        trainer = sft(chats(), max_steps=3, model=tiny_llama(attention_dropout=0.1))
        trainer.add_callback(RankPageCallback(Reporter(tmp_path / "rank.page")))
        trainer.train()
        return [value.numpy().tobytes() for value in trainer.model.state_dict().values()]

    assert trained("off") == trained("refuse")
