"""The audit of a Hugging Face or TRL trainer's first batches, run by its callback before the first step.

The trainer's own collator makes batches of rows from the beginning of the data set and from all over it. Order, random
numbers and loader of the training stay as they are. Of a stream, which cannot be indexed, it is the first
batch. Of a trainer that generates, it is what the model is given.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NoReturn

import torch
from transformers import Trainer

from opsd.events import Audited
from opsd.posttrain.audit import Expected, Finding, Group, Report, audit, audit_overlap
from opsd.posttrain.batches import Words, is_language_batch, read_batch, rows_of
from opsd.posttrain.packing import audit_packing, first_packed
from opsd.posttrain.rows import Example
from opsd.words import duration, plural

AUDIT = "OPSD_AUDIT"
"""The environment variable: refuse, warn, off, or only, which ends the program after the audit."""
MODES = ("refuse", "warn", "off", "only")
ROWS = 128
RAW_ROWS = 2000
"""Raw rows among which those of a packed document are looked for."""
COMPARED = 20_000
"""Rows of each set that are compared for duplicates between training and evaluation."""
LIMIT_S = 30.0
DATA = "_opsd_data"
"""The attribute of a trainer that holds the data sets that it was constructed with: ``(training, evaluation)``."""


class AuditRefusedError(Exception):
    """The first batches are not what the rows say; the message says which row."""


def audit_mode(environ: Mapping[str, str] = os.environ) -> str:
    """What ``OPSD_AUDIT`` asks for, ``off`` if nothing does. Raises ValueError for another word."""
    mode = environ.get(AUDIT, "off") or "off"
    if mode not in MODES:
        raise ValueError(f"{AUDIT} is {mode!r:.40}; it may be {', '.join(MODES)}")
    return mode


def audit_trainer(trainer: Trainer, inputs: Any, mode: str, event: Callable[..., None]) -> None:
    """Audit before the first step, on the first rank; on all if a packed batch goes through a sharded model.

    ``event`` writes one of the run.
    Raises AuditRefusedError if there are findings and ``mode`` is refuse or only, SystemExit(0) after one that is all.
    """
    began = time.monotonic()
    speaks, sharded = trainer.args.process_index == 0, _is_sharded(trainer)
    if speaks or sharded:
        report = audit_of(trainer, inputs, everything=speaks)
        if speaks:
            seconds = time.monotonic() - began
            told = Audited(
                documents=report.documents,
                findings=[str(finding) for finding in report.findings],
                notes=report.notes,
                mode=mode,
                seconds=round(seconds, 3),
            )
            event("audited", **told)
            _tell(report, mode, seconds)
    if mode == "only":
        sys.exit(0)


def audit_of(trainer: Trainer, inputs: Any, *, everything: bool = True) -> Report:
    """What is wrong with the first batches; without ``everything`` only what needs all ranks of a sharded model."""
    tokenizer = getattr(trainer, "processing_class", None)
    batches = list(_first_batches(trainer, inputs))
    language = [(rows, batch) for rows, batch in batches if is_language_batch(batch)]
    if tokenizer is None or not hasattr(tokenizer, "decode") or not language:
        return Report(notes=["the batches are not those of a causal language model, and were not compared with rows"])
    report = Report()
    if everything:
        words = Words.of(tokenizer, _model_ends(trainer), getattr(trainer, "chat_template", None))
        groups = list(_groups(trainer, language))
        report = audit(groups, words, expected=_expected(trainer.args), longest=_longest(trainer.args))
        _overlap(trainer, report)
    report.findings += _packing(trainer, language, report)
    return report


def _tell(report: Report, mode: str, seconds: float) -> None:
    looked = f"{plural(report.documents, 'document')} of the first batches"
    for note in report.notes:
        print(f"opsd: audit: {note}", file=sys.stderr, flush=True)
    if not report.findings:
        print(f"opsd: audit: {looked} in {duration(seconds)}, nothing found", file=sys.stderr, flush=True)
        return
    for finding in report.findings:
        print(f"opsd: audit: {finding}", file=sys.stderr, flush=True)
    if mode != "warn":
        _refuse(report.findings)


def _refuse(findings: list[Finding]) -> NoReturn:
    more = f" ({len(findings) - 1} more above)" if len(findings) > 1 else ""
    raise AuditRefusedError(f"{findings[0]}{more} To train all the same: opsd launch --audit warn.")


def refuse_resume(problems: list[str], mode: str) -> None:
    """Raises AuditRefusedError if there are problems, unless ``mode`` is warn; then they are printed."""
    for problem in problems:
        print(f"opsd: audit: {problem}", file=sys.stderr, flush=True)
    if problems and mode != "warn":
        _refuse([Finding("resume", problem) for problem in problems])


def _is_sharded(trainer: Trainer) -> bool:
    return bool(getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_deepspeed_enabled", False))


Batch = tuple[list[tuple[int, Mapping[str, Any]]], Mapping[str, Any]]
"""Rows with their numbers, and the collated batch of them."""


def _first_batches(trainer: Any, inputs: Any) -> Iterator[Batch]:
    data, collate = trainer.train_dataset, trainer.data_collator
    if not isinstance(inputs, Mapping):
        return
    if "prompt_ids" in inputs or not _is_indexed(data):
        yield [], inputs
        return
    size, deadline = max(1, trainer.args.per_device_train_batch_size), time.monotonic() + LIMIT_S
    removed = _columns_kept(trainer)
    numbers = _chosen(len(data))
    with _same_random_numbers():
        for at in range(0, len(numbers), size):
            rows = [(number, data[number]) for number in numbers[at : at + size]]
            given = [dict(row) if isinstance(row, Mapping) else row for _, row in rows]
            if removed is not None:
                given = [{name: row[name] for name in removed if name in row} for row in given]
            yield [(number, row) for number, row in rows if isinstance(row, Mapping)], collate(given)
            if time.monotonic() > deadline:
                return


def _is_indexed(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not hasattr(data, "_ex_iterable")


def _columns_kept(trainer: Any) -> list[str] | None:
    """The columns that the loader leaves to the collator, None for all."""
    if not trainer.args.remove_unused_columns or not hasattr(trainer.train_dataset, "column_names"):
        return None
    trainer._set_signature_columns_if_needed()
    return list(trainer._signature_columns or ())


def _chosen(length: int) -> list[int]:
    """Half of the rows from the beginning, half spread over the rest."""
    begin = min(length, ROWS // 2)
    rest = length - begin
    spread = min(rest, ROWS - begin)
    return [*range(begin), *(begin + at * rest // spread for at in range(spread))]


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Collators may draw some: the training draws the same ones as without an audit."""
    plain, numpy = random.getstate(), sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(plain)
        if numpy is not None:
            numpy.random.set_state(drawn)


def _groups(trainer: Trainer, batches: Sequence[Batch]) -> Iterator[Group]:
    """Rows and documents; of packed rows, and of prompts that a trainer has shuffled, the raw data set has the rows."""
    scattered = []
    for rows, batch in batches:
        examples = [Example.of(row, number) for number, row in rows]
        pairs = bool(examples) and all(each is not None and each.kind == "pair" for each in examples)
        pairs = pairs or ("completion_mask" in batch and any("chosen_ids" in row for _, row in rows))
        documents = read_batch(batch, pairs=pairs)
        if any(examples) and len(documents) == len(rows) * (2 if pairs else 1):
            yield Group(examples, documents)
        else:
            scattered += documents
    if scattered and _cuts_rows(trainer.args):
        yield Group([], scattered)
    elif scattered:
        raw = islice(_raw(trainer)[0] or (), RAW_ROWS)
        yield Group([Example.of(row, number) for number, row in enumerate(raw)], scattered, aligned=False)


def _cuts_rows(arguments: Any) -> bool:
    """Whether the trainer's packing cuts rows anywhere: what a document lacks is then in another one."""
    return bool(getattr(arguments, "packing", False)) and getattr(arguments, "packing_strategy", "bfd") != "bfd"


def _raw(trainer: Any) -> tuple[Iterable[Mapping[str, Any]] | None, Any]:
    """The data sets as the program gave them to the trainer."""
    training, evaluation = getattr(trainer, DATA, (None, None))
    return (training if training is not None else trainer.train_dataset), evaluation


def _overlap(trainer: Trainer, report: Report) -> None:
    training, evaluation = _raw(trainer)
    if training is None or not _is_indexed(training) or evaluation is None:
        return
    for one in evaluation.values() if isinstance(evaluation, Mapping) else [evaluation]:
        if _is_indexed(one):
            audit_overlap(_mappings(training), _mappings(one), report)


def _mappings(rows: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    return (row for row in islice(rows, COMPARED) if isinstance(row, Mapping))


def _packing(trainer: Any, batches: Sequence[Batch], report: Report) -> list[Finding]:
    """Measured in the model, in the first batch that has several documents in a row."""
    found = (
        (batch, first_packed(batch) or _joined(rows, batch)) for rows, batch in batches if "prompt_ids" not in batch
    )
    batch, place = next(((batch, place) for batch, place in found if place is not None), (None, None))
    if batch is None or place is None:
        return []
    try:
        return audit_packing(trainer.model_wrapped if _is_sharded(trainer) else trainer.model, batch, *place)
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
        why = f"whether packed documents see each other could not be measured: {type(error).__name__}: {error}"
        return [
            Finding("packing_unknown", f"{why:.300}.", "Switch packing off, or audit with a model that can be called.")
        ]


def _joined(rows: Sequence[tuple[int, Mapping[str, Any]]], batch: Mapping[str, Any]) -> tuple[int, int] | None:
    """The first row's length where a collator has put the tokens of two rows behind each other without a boundary."""
    ids = [list(row["input_ids"]) for _, row in rows[:2] if "input_ids" in row]
    if len(ids) < 2 or "input_ids" not in batch:
        return None
    begin, joined = rows_of(batch["input_ids"])[0], ids[0] + ids[1]
    return (0, len(ids[0])) if begin[: len(joined)] == joined else None


def _model_ends(trainer: Trainer) -> tuple[int, ...]:
    """The tokens at which the model's own settings stop a generation."""
    settings = getattr(getattr(trainer, "model", None), "generation_config", None)
    ends = getattr(settings, "eos_token_id", None)
    return () if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (int(ends),)


def _expected(arguments: Any) -> Expected:
    if getattr(arguments, "assistant_only_loss", None) or getattr(arguments, "completion_only_loss", None):
        return "answers"
    return "all" if getattr(arguments, "completion_only_loss", None) is False else "auto"


def _longest(arguments: Any) -> int | None:
    length = getattr(arguments, "max_length", None)
    return length if isinstance(length, int) else None
