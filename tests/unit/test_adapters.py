"""What all adapters share: the fence before a checkpoint, the record that a resume goes by, tokens."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd import exitcodes
from opsd.adapters.resuming import (
    FILE,
    FREE,
    OF_SAMPLES,
    ResumeRefusedError,
    chosen,
    data_digest,
    keep,
    known,
    notes,
    problems,
)
from opsd.adapters.shared import Gate, Share
from opsd.checkpoints.claims import FOLDER, Claim, ClaimError, Fence, create
from opsd.client import Reporter

# The look before each checkpoint of an adapter: who may write does, who was overtaken ends.


def test_without_a_launcher_the_gate_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that was started by hand has no run that could go on without it."""
    monkeypatch.delenv("OPSD_RUN_DIR", raising=False)
    Gate(Reporter(None)).pass_through()


def test_a_rank_of_the_newest_generation_passes(tmp_path: Path) -> None:
    """Until a later one has been claimed."""
    assert create(tmp_path, Claim(1, "s", "n1 7"))
    gate = Gate(Reporter(None), Fence(tmp_path, 1))
    gate.pass_through()
    assert create(tmp_path, Claim(2, "s", "n2 8"))
    with pytest.raises(SystemExit) as end:
        gate.pass_through()
    assert end.value.code == exitcodes.FENCED


def test_a_file_server_that_comes_back_delays_and_nothing_else(tmp_path: Path) -> None:
    """It is waited for; after the limit the rank fails, so that the run starts again."""
    (tmp_path / FOLDER).write_text("in the way")
    with pytest.raises(ClaimError, match="whether generation 1 may write cannot be seen"):
        Gate(Reporter(None), Fence(tmp_path, 1), limit_s=0).pass_through()
    timer = threading.Timer(0.5, (tmp_path / FOLDER).unlink)
    timer.start()
    Gate(Reporter(None), Fence(tmp_path, 1)).pass_through()
    timer.join()


# The record of a training's last checkpoint, and whether a training goes on with the same data.


PLAN: dict[str, Any] = {
    "planned_steps": 10, "samples_of_a_step": 8, "seeds": [42, None], "rollouts_of_a_prompt": None, "rows": "a",
    "settings": {"max_length": "512", "learning_rate": "0.1", "gone": "1"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("now", "step", "skips", "said"),
    [
        ({}, 4, False, []),
        ({"planned_steps": 20}, 4, False, []),
        ({"planned_steps": 3}, 4, False, ["only 3 are planned"]),
        ({"rows": "b"}, 4, False, ["twice, or never"]),
        ({"samples_of_a_step": 4}, 4, False, ["were 8 and are 4"]),
        ({"seeds": [1, None]}, 4, False, ["The seeds were"]),
        (
            {"settings": {"max_length": "256", "new": "1"}},
            4,
            False,
            ["max_length was 512 at the checkpoint and is 256"],
        ),
        ({"settings": {"max_length": "512", "learning_rate": "0.2"}}, 4, False, []),
        ({}, 4, True, ["ignore_data_skip"]),
        ({"rows": "b", "rollouts_of_a_prompt": 8}, 4, False, ["twice, or never", "rollouts of a prompt"]),
    ],
)
def test_what_keeps_a_training_from_going_on(now: dict[str, Any], step: int, skips: bool, said: list[str]) -> None:
    """More steps may be planned; other data, batches or seeds move the place in the data."""
    found = problems(PLAN, PLAN | now, step, skips_data=skips)
    assert len(found) == len(said)
    assert all(part in sentence for part, sentence in zip(said, found, strict=True))


def test_a_changed_setting_that_leaves_the_samples_is_noted() -> None:
    """A learning rate may be another on purpose."""
    assert notes(PLAN, {"settings": {"max_length": "1", "learning_rate": "0.2"}}) == [
        "learning_rate was 0.1 at the checkpoint and is 0.2."
    ]


def test_which_settings_decide_the_samples() -> None:
    """By name, in all releases; paths, logs and the number of steps may change."""
    decide = (
        "train_sampling_strategy group_by_length dataloader_drop_last packing packing_strategy max_length "
        "max_seq_length "
        "max_prompt_length truncation_mode shuffle_dataset padding_free accelerator_config num_iterations eos_token "
        "chat_template_path dataset_text_field generation_batch_size completion_only_loss dataloader_in_order"
    )
    may = (
        "output_dir logging_steps save_steps save_total_limit hub_token max_steps num_train_epochs eval_steps seed "
        "dataloader_num_workers dataset_num_proc per_device_train_batch_size vllm_max_model_length report_to"
    )
    noted = "learning_rate lr_scheduler_type optim weight_decay bf16 beta loss_type max_completion_length temperature"
    assert all(OF_SAMPLES.fullmatch(name) and not FREE.fullmatch(name) for name in decide.split())
    assert all(FREE.fullmatch(name) for name in may.split())
    assert not any(OF_SAMPLES.fullmatch(name) or FREE.fullmatch(name) for name in noted.split())


def save(run: Path, name: str, step: int) -> Path:
    folder = run / name / f"checkpoint-{step}"
    (folder / "global_step2").mkdir(parents=True)
    for file in ("model.safetensors", "optimizer.pt", "rng_state_0.pth", "global_step2/shard.pt"):
        (folder / file).write_bytes(EMPTY_MODEL)
    (folder / "trainer_state.json").write_text("{}")
    return folder


EMPTY_MODEL = (2).to_bytes(8, "little") + b"{}"


def test_a_record_for_each_output_folder(tmp_path: Path) -> None:
    """A script may train twice. If the record is damaged, nothing begins again in silence."""
    run, sft = str(tmp_path), str(tmp_path / "sft")
    for name, step in (("sft", 4), ("dpo", 2), ("sft", 8)):
        save(tmp_path, name, step)
        keep(run, str(tmp_path / name), step, PLAN)
    assert chosen(None, run, sft) == str(tmp_path / "sft/checkpoint-8")
    assert [(each["step"], each["plan"]) for each in known(run, sft)] == [(8, PLAN), (4, PLAN)]
    assert chosen(None, None, sft) is None
    assert chosen(None, run, str(tmp_path / "kto")) is None
    for damaged in ("{", "[]"):
        (tmp_path / FILE).write_text(damaged)
        with pytest.raises(ResumeRefusedError, match="remove it to begin again"):
            chosen(None, run, sft)
    keep(run, sft, 8, PLAN)
    assert chosen(None, run, sft) == str(tmp_path / "sft/checkpoint-8")


@pytest.mark.parametrize(
    ("name", "bytes_left", "said"),
    [
        *((name, None, f"{name} is missing") for name in ("optimizer.pt", "rng_state_0.pth", "global_step2/shard.pt")),
        ("model.safetensors", 4, "model.safetensors has 4 bytes instead of 10"),
        ("trainer_state.json", 0, "trainer_state.json has 0 bytes instead of 2"),
        ("", None, "it is not there"),
    ],
)
def test_a_checkpoint_that_has_lost_a_part(tmp_path: Path, name: str, bytes_left: int | None, said: str) -> None:
    """The last complete one is taken and the fault named; without one the run is refused."""
    run, output, told = str(tmp_path), str(tmp_path / "out"), list[str]()
    first, second = save(tmp_path, "out", 2), save(tmp_path, "out", 4)
    for step in (2, 4):
        keep(run, output, step, PLAN)
    for folder in (second, first):
        if not name:
            folder.rename(folder.with_name("elsewhere" + folder.name))
        elif bytes_left is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes((folder / name).read_bytes()[:bytes_left])
        if folder == second:
            for given in (None, True):
                assert chosen(given, run, output, told.append) == str(first)
    assert told == [f"{second} is not complete: {said}"] * 2
    with pytest.raises(ResumeRefusedError, match=f"{said}, and none of 1 earlier ones is. Put it back"):
        chosen(None, run, output)


LAYOUTS = {
    "fsdp sharded": [f"{part}/{name}" for part in ("pytorch_model_fsdp_0", "optimizer_0")
                     for name in (".metadata", "__0_0.distcp", "__1_0.distcp")],
    "fsdp full": ["pytorch_model_fsdp.bin", "optimizer.bin"],
    "zero 2": ["latest", "global_step4/mp_rank_00_model_states.pt",
               *(f"global_step4/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))],
    "zero 3": ["latest", *(f"global_step4/zero_pp_rank_{rank}_mp_rank_00_{what}_states.pt"
                           for rank in (0, 1) for what in ("model", "optim"))],
}  # fmt: skip
"""The files of checkpoints of which each rank writes a part, as transformers' Trainer leaves them."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_of_all_ranks_are_known(tmp_path: Path, layout: str) -> None:
    """Each of them is missed, and so is the end of each."""
    run, output = str(tmp_path), str(tmp_path / "out")
    folder = tmp_path / "out/checkpoint-4"
    files = [*LAYOUTS[layout], "rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "trainer_state.json"]
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    keep(run, output, 4, PLAN)
    told = list[str]()
    assert chosen(None, run, output, told.append) == str(folder)
    assert not told, "there is an optimizer"
    for name in files:
        for left, said in ((None, "is missing"), ("{", "has 1 bytes instead of 2")):
            (folder / name).unlink()
            if left is not None:
                (folder / name).write_text(left)
            with pytest.raises(ResumeRefusedError, match=f"{name} {said}"):
                chosen(None, run, output)
            (folder / name).write_text("{}")
    assert chosen(None, run, output) == str(folder)


def test_a_checkpoint_without_an_optimizer_is_told(tmp_path: Path) -> None:
    """Of save_only_model: there was none from the start."""
    folder, told = save(tmp_path, "out", 2), list[str]()
    (folder / "optimizer.pt").unlink()
    keep(str(tmp_path), str(tmp_path / "out"), 2, PLAN)
    assert chosen(None, str(tmp_path), str(tmp_path / "out"), told.append) == str(folder)
    assert "no optimizer (save_only_model)" in told[0]


def test_a_checkpoint_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    """What a script asks for counts, unless a rank died while it saved that checkpoint."""
    run, output = str(tmp_path), str(tmp_path / "out")
    first, second, third = (tmp_path / f"out/checkpoint-{step}" for step in (2, 4, 12))
    assert chosen(True, run, output) is True, "transformers says that there is none"
    third.mkdir(parents=True)
    assert [chosen(given, run, output) for given in (True, str(third))] == [None, None]
    for folder in (first, second):
        save(tmp_path, "out", int(folder.name[11:]))
    (third / "trainer_state.json").write_text("{}")
    (third / "model.safetensors").write_bytes(EMPTY_MODEL[:-1])
    assert [chosen(given, run, output) for given in (True, str(third))] == [str(second)] * 2
    keep(run, output, 2, PLAN)
    assert [chosen(given, run, output) for given in (True, str(third), None)] == [str(first)] * 3
    assert [chosen(given, run, output) for given in (str(second), False, "base")] == [str(second), False, "base"]


def test_a_digest_of_the_data() -> None:
    """Rows, their order and their number count, white space does not; a stream has none."""
    rows = [{"text": f"row {at}"} for at in range(600)]
    assert data_digest(rows) == data_digest([{"text": f"row  {at}"} for at in range(600)])
    assert data_digest(rows) != data_digest(rows[:-1])
    assert data_digest(rows) != data_digest(rows[::-1])
    assert data_digest(iter(rows)) is None


def test_a_digest_of_tables() -> None:
    """All rows count, however they lie in memory."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = [{"text": f"row {at}", "label": at % 2 == 0, "ids": [at] * (at % 5)} for at in range(3000)]
    table = datasets.Dataset.from_list(rows)
    parts = datasets.concatenate_datasets([table.select(range(1001)), table.select(range(1001, 3000))])
    assert data_digest(table) == data_digest(parts)
    assert data_digest(table) == data_digest(table.select(range(2999, -1, -1)).select(range(2999, -1, -1)))
    for at in (0, 1, 1777, 2999):
        changed = [row | {"text": "other"} if number == at else row for number, row in enumerate(rows)]
        assert data_digest(table) != data_digest(datasets.Dataset.from_list(changed))


# Tokens of ranks that share their batches.


@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(1, 16))
def test_the_shares_add_up(batches: list[int], sharing: int) -> None:
    """Whatever the ranks that share a batch: together they count its tokens, but for fractions that wait."""
    rank, counted = Share(), 0
    for tokens in batches:
        rank.add(tokens, sharing)
        counted += rank.take()
    assert sum(batches) - sharing < counted * sharing <= sum(batches)
