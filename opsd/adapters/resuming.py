"""Which checkpoint a training goes on from, and whether it goes on with the same data.

What a checkpoint holds, and whether it still does: names, sizes, and a digest of each file's beginning and end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from opsd import durable
from opsd.posttrain.rows import digest

STATE = "trainer_state.json"
"""What transformers writes last into a checkpoint."""
ENDS = 1 << 16
"""Bytes of the beginning and of the end of a file that are compared, besides its size."""
SKIPPED = ("awaiting-evaluation", "README.md")
NAMED = 3
Contents = Mapping[str, list[Any]]


def contents(folder: Path) -> dict[str, list[Any]]:
    """Size and digest of each file below ``folder``, those that cannot be read left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in SKIPPED and (mark := _mark(path)) is not None:
            found[path.relative_to(folder).as_posix()] = mark
    return found


def _mark(path: Path) -> list[Any] | None:
    try:
        with path.open("rb") as file:  # opening it asks a network file system for its size anew
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.blake2b(file.read(ENDS), digest_size=8)
            file.seek(max(0, size - ENDS))
            digest.update(file.read(ENDS))
    except OSError:
        return None
    return [size, digest.hexdigest()]


def faults_in(folder: Path, before: Contents | None) -> str:
    """What ``folder`` lacks of what it held ``before``, or of what any checkpoint needs; "" if nothing."""
    if not folder.is_dir():
        return "it is not there"
    wrong = _differences(folder, before) if before else []
    wrong = wrong or _unreadable(folder)
    more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
    return ", ".join(wrong[:NAMED]) + more


def _differences(folder: Path, before: Contents) -> list[str]:
    found = []
    for name, mark in before.items():
        now = _mark(folder / name)
        if now is None:
            found.append(f"{name} is missing" if not (folder / name).exists() else f"{name} cannot be read")
        elif now[0] != mark[0]:
            found.append(f"{name} has {now[0]} bytes instead of {mark[0]}")
        elif now != list(mark):
            found.append(f"{name} has changed")
    return found


def _unreadable(folder: Path) -> list[str]:
    """Of a checkpoint without a record: a state, whole safetensors, and the shards of an index."""
    found = [] if _json(folder / STATE) is not None else [f"{STATE} is missing or damaged"]
    found += [f"{path.name} is cut off" for path in sorted(folder.glob("*.safetensors")) if not _is_whole(path)]
    for index in folder.glob("*.index.json"):
        shards = set((_json(index) or {}).get("weight_map", {}).values())
        found += [f"{name} is missing" for name in sorted(shards) if not (folder / name).is_file()]
    return found


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _is_whole(path: Path) -> bool:
    """Whether the file is as long as its header says."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length < size:
                return False
            header = json.loads(file.read(length))
        ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False
    return bool(size == 8 + length + max(ends, default=0))


# The checkpoint from which a training of this run goes on, and whether it goes on with the same data.
#
# After each save the first rank writes ``transformers.json`` in the run's folder. It names the checkpoint and what
# the training is made of: data, settings, samples of a step, seeds, planned steps. These must stay as they are,
# since transformers finds its place in the data by counting steps. The file also lists what each checkpoint holds
# (``holding.py``). No training goes on from one that has lost a part.


FILE = "transformers.json"
SAMPLED, LISTED = 256, 100_000
"""Rows that are compared of a data set that computes its rows, and of a list."""
BATCH, HASHED_BYTES = 1024, 4 << 30
"""Rows that are hashed at once, and about how many bytes in all: of larger data sets every n-th batch."""
Plan = dict[str, Any]
Record = dict[str, Any]
FREE = re.compile(
    r"output_dir|overwrite_output_dir|run_name|project|report_to|disable_tqdm|debug|skip_memory_metrics|local_rank"
    r"|(logging|log|save|hub|push_to_hub|eval|trackio|vllm|ddp|ray|include)_.*|evaluation_strategy|push_to_hub|.*_eval"
    r"|(per_device|fp16_full|bf16_full|do|batch)_eval.*|do_.*|prediction_loss_only|load_best_model_at_end"
    r"|metric_for_best_model|greater_is_better|resume_from_checkpoint|ignore_data_skip|restore_callback_.*|max_steps"
    r"|enable_jit_checkpoint|num_train_epochs|seed|data_seed|num_generations|per_device_train_batch_size|no_cuda|use_cpu"
    r"|gradient_accumulation_steps|steps_per_generation|dataset_num_proc|dataloader_(num|pin|persist|prefetch|multi).*"
    r"|num_completions_to_print|model_init_kwargs|torch_empty_cache_steps"
)
"""Settings that may change, or that are compared in another way."""
OF_SAMPLES = re.compile(
    r"(data|packing|padding|pad_|shuffle|truncation|train_sampling|group_by|remove_unused|length_column|label_names)"
    r".*|.*(shuffle|packing|sampler|template).*|max_(seq_|prompt_)?length|(eos|pad)_token|generation_batch_size"
    r"|num_iterations|accelerator_config|(assistant|completion)_only_loss"
)
"""Settings that decide which samples come in which order, or what they hold."""


class ResumeRefusedError(Exception):
    """It is not known where the training goes on, or its checkpoint is gone; the message says what to do."""


def plan_of(trainer: Any) -> Plan:
    """What decides which samples a step has; ``rows`` is None for a stream."""
    arguments = trainer.args
    samples = arguments.per_device_train_batch_size * arguments.world_size * arguments.gradient_accumulation_steps
    return {
        "planned_steps": int(trainer.state.max_steps),
        "samples_of_a_step": int(samples),
        "seeds": [arguments.seed, arguments.data_seed],
        "rollouts_of_a_prompt": getattr(arguments, "num_generations", None),
        "rows": data_digest(trainer.train_dataset),
        "settings": settings_of(arguments) | {"mixed_precision": json.dumps(trainer.accelerator.mixed_precision)},
    }


def settings_of(arguments: Any) -> dict[str, str]:
    """All settings that are not ``FREE``. Those that a program has added to transformers' and TRL's are its own."""
    kinds = (kind for kind in type(arguments).__mro__ if kind.__module__.partition(".")[0] in ("transformers", "trl"))
    kind = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
    names = [each.name for each in dataclasses.fields(kind)] if kind is not None else []
    return {name: _shown(getattr(arguments, name, None)) for name in names if not FREE.fullmatch(name)}


def _shown(value: Any) -> str:
    """The same in each process: an object is its fields, or else its type."""
    try:
        return json.dumps(value, sort_keys=True, default=_plain)
    except (TypeError, ValueError):
        return type(value).__name__


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return vars(value)
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value if isinstance(value, str) else getattr(value, "value", type(value).__name__)


def data_digest(data: Any) -> str | None:
    """Of the rows and their number, None for a stream: of all rows that are tables or lists, unless there are many."""
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or not len(data):
        return None
    found, length = hashlib.blake2b(str(len(data)).encode(), digest_size=12), len(data)
    if hasattr(data, "with_format") and hasattr(data, "column_names"):
        _hash_tables(data.with_format("arrow"), found)
        return found.hexdigest()
    count = min(length, LISTED if isinstance(data, list | tuple) else SAMPLED)
    for at in range(count):
        row = data[at * length // count]
        found.update(digest(row) if isinstance(row, Mapping) else b"?")
    return found.hexdigest()


def _hash_tables(data: Any, found: Any) -> None:
    """The rows as Arrow writes them to a file: it does not matter how they are cut into chunks."""
    length, step, at = len(data), BATCH, 0
    while at < length:
        table = data[at : at + BATCH]
        if at == 0:
            found.update(repr([(name, str(table.schema.field(name).type)) for name in table.column_names]).encode())
            step = BATCH * (1 + int(table.nbytes / table.num_rows * length) // HASHED_BYTES)
        for batch in table.take([*range(table.num_rows)]).combine_chunks().to_batches():
            found.update(batch.serialize())
        at += step


def problems(before: Plan, now: Plan, step: int, *, skips_data: bool = False) -> list[str]:
    """Why a training with the plan ``now`` does not go on from ``step`` of one with the plan ``before``. Pure."""
    found = []
    if skips_data:
        found.append("ignore_data_skip begins with the first sample again: leave it out.")
    if "rows" in before and before["rows"] != now.get("rows"):
        found.append("The data set is not the one of the checkpoint: samples would be trained twice, or never.")
    for name, what in (
        ("samples_of_a_step", "samples of a step"),
        ("rollouts_of_a_prompt", "rollouts of a prompt"),
        ("seeds", "seeds"),
    ):
        if before.get(name) != now.get(name):
            found.append(
                f"The {what} were {before.get(name)} and are {now.get(name)}: the order of the data is another."
            )
    found += [
        f"{change}: the samples, or their order, are others."
        for name, change in _changes(before, now)
        if OF_SAMPLES.fullmatch(name)
    ]
    if step > now.get("planned_steps", 0):
        found.append(f"Step {step} is done, and only {now.get('planned_steps')} are planned.")
    return found


def notes(before: Plan, now: Plan) -> list[str]:
    """Settings that have changed since the checkpoint and leave the samples as they are. Pure."""
    return [f"{change}." for name, change in _changes(before, now) if not OF_SAMPLES.fullmatch(name)]


def _changes(before: Plan, now: Plan) -> list[tuple[str, str]]:
    """Names that one of both has not are those of another release of transformers or TRL."""
    old, new = before.get("settings", {}), now.get("settings", {})
    changed = [name for name in old if name in new and old[name] != new[name]]
    return [(name, f"{name} was {old[name]:.80} at the checkpoint and is {new[name]:.80}") for name in changed]


def keep(run: str | None, output: str, step: int, plan: Plan, *, shared: bool = True) -> None:
    """Note that the checkpoint of ``step`` below ``output`` is there. A run without a folder has no record.

    What it holds is noted if all nodes see the same folder (``shared``).
    """
    if not run:
        return
    path, folder = Path(run, FILE), Path(output, f"checkpoint-{step}").resolve()
    known: dict[str, Any] = {}
    try:
        known = _read(path)
    except ResumeRefusedError as error:
        print(f"opsd: {error}; it is written anew", file=sys.stderr, flush=True)
    earlier = [each for each in _records(known, output) if each["step"] < step and Path(each["checkpoint"]).is_dir()]
    record = {"step": step, "checkpoint": str(folder), "plan": plan}
    if shared:
        record["files"] = contents(folder)
    known[_name(output)] = record | {"earlier": earlier}
    try:
        durable.replace(path, json.dumps(known, indent=1).encode())
    except OSError as error:
        print(f"opsd: {path} cannot be written: {error.strerror}; a restart begins again", file=sys.stderr, flush=True)


def known(run: str | None, output: str) -> list[Record]:
    """The records of the checkpoints of ``output``, the last one first. Raises ResumeRefusedError."""
    return _records(_read(Path(run, FILE)), output) if run else []


def _records(known: dict[str, Any], output: str) -> list[Record]:
    last = known.get(_name(output))
    if not isinstance(last, dict):
        return []
    found = [{name: last[name] for name in last if name != "earlier"}, *last.get("earlier", [])]
    return [each for each in found if isinstance(each, dict) and {"step", "checkpoint", "plan"} <= each.keys()]


def _silent(_: str) -> None:
    pass


def chosen(given: Any, run: str | None, output: str, say: Callable[[str], None] = _silent) -> Any:
    """What ``trainer.train`` is to resume from if the program says ``given``: a checkpoint that is complete, or None.

    A rank that dies while it saves leaves a folder without a state. ``resume_from_checkpoint=True``, and the path from
    transformers' ``get_last_checkpoint``, are such a folder then, and each start fails. ``say`` gets what is wrong with
    those that are passed over. Raises ResumeRefusedError.
    """
    records = known(run, output)
    held = {each["checkpoint"]: each.get("files") for each in records}
    if given is not None and given is not True:
        path = Path(given).resolve() if isinstance(given, str | os.PathLike) else None
        if path is None or not path.name.startswith("checkpoint-") or not path.is_dir():
            return given
        if not (faults := faults_in(path, held.get(str(path)))):
            return given
        say(f"{path} is not complete: {faults}")
    if records:
        return _last_complete(records, str(run), say)
    if given is None:
        return None
    found = [path for path in Path(output).glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
    for path in sorted(found, key=lambda path: -int(path.name.rpartition("-")[2])):
        if not (faults := faults_in(path, None)):
            return str(path)
        say(f"{path} is not complete: {faults}")
    return given if given is True and not found else None


def _last_complete(records: list[Record], run: str, say: Callable[[str], None]) -> str:
    """To begin again would train the same samples twice, and end with exit code 0: so it is refused."""
    wrong = []
    for record in records:
        path, files = Path(record["checkpoint"]), record.get("files")
        if not (faults := faults_in(path, files)):
            if files and not any("optim" in name for name in files):
                say(f"{path} has no optimizer (save_only_model): the training does not go on exactly")
            return str(path)
        wrong.append(f"{path} is not complete: {faults}")
        say(wrong[-1])
    more = f", and none of {len(wrong) - 1} earlier ones is" if len(wrong) > 1 else ""
    raise ResumeRefusedError(
        f"{wrong[0]}{more}. Put it back, pass resume_from_checkpoint, or remove {Path(run, FILE)} to begin again"
    )


def _name(output: str) -> str:
    return os.path.realpath(output)


def _read(path: Path) -> dict[str, Any]:
    """Raises ResumeRefusedError for a file that is there and cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ResumeRefusedError(f"{path} cannot be read ({error}): remove it to begin again") from error
    if not isinstance(found, dict):
        raise ResumeRefusedError(f"{path} is not a record of trainings: remove it to begin again")
    return found
