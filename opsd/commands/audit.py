"""``opsd audit``: whether batches of a post-training are what their rows say."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from opsd import exitcodes
from opsd.commands.options import exit_codes, option

if TYPE_CHECKING:
    from opsd.posttrain.audit import Expected, Report

_FILE = click.Path(exists=True, path_type=Path)


@click.group()
def audit() -> None:
    """Compare what a post-training learns with the rows that it has.

    `opsd launch` does it before the first step of every Hugging Face or TRL trainer. `opsd audit batches` does it for
    a dump of any other loader.
    """


@audit.command(
    epilog=exit_codes(
        {
            0: "nothing was found",
            1: "something was found",
            2: "the command line is wrong, or a file cannot be read",
        }
    )
)
@click.argument("batches", type=_FILE, metavar="FILE")
@option("--rows", type=_FILE, required=True, metavar="FILE", help="The raw rows as JSON lines.")
@option("--tokenizer", type=_FILE, required=True, metavar="FOLDER", help="The tokenizer, with its chat template.")
@option("--model", type=_FILE, metavar="FOLDER", help="Measure in this model whether packed documents see each other.")
@option("--evaluation", type=_FILE, metavar="FILE", help="Evaluation rows, which must not be among the others.")
@option(
    "--loss",
    type=click.Choice(["auto", "answers", "all"]),
    default="auto",
    help="What the loss should cover; auto: answers, and conversations as a whole if no part of any is masked.",
)
@option("--max-length", type=click.IntRange(1), help="Tokens at which the loader cuts rows off.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def batches(
    batches: Path,
    rows: Path,
    tokenizer: Path,
    model: Path | None,
    evaluation: Path | None,
    loss: str,
    max_length: int | None,
    as_json: bool,
) -> int:
    """Audit a dump of collated batches.

    FILE is a .safetensors file, or a .pt file with a dict or a list of dicts of tensors: input_ids with labels or with
    completion_mask, and attention_mask, position_ids or seq_idx where the loader makes them. In a .safetensors file the
    names of several batches begin with their number: 0.input_ids, 0.labels, 1.input_ids. A batch of pairs has the
    chosen ones in its first half and the rejected ones in the second. The rows may have any format that TRL documents.

        opsd audit batches first.pt --rows train.jsonl --tokenizer checkpoints/base
    """
    os.environ["OPSD_AUDIT"] = "off"
    from opsd.posttrain.audit import DumpError

    try:
        report = _audited(batches, rows, tokenizer, model, evaluation, cast("Expected", loss), max_length)
    except (DumpError, ValueError) as error:
        raise click.UsageError(f"{error}") from error
    except ImportError as error:
        raise click.UsageError(f"this needs {error.name}: pip install transformers torch") from error
    if as_json:
        click.echo(json.dumps(_described(report)))
    else:
        _print(report)
    return exitcodes.FAILED if report.findings else exitcodes.OK


def _audited(
    batches: Path,
    rows: Path,
    tokenizer: Path,
    model: Path | None,
    evaluation: Path | None,
    loss: Expected,
    max_length: int | None,
) -> Report:
    from transformers import AutoTokenizer

    from opsd.posttrain.audit import DumpError, audit, audit_overlap, groups_of, read_batches, read_rows
    from opsd.posttrain.batches import Words

    found, raw = read_batches(batches), read_rows(rows)
    try:
        words = Words.of(AutoTokenizer.from_pretrained(tokenizer, local_files_only=True))
    except (OSError, ValueError) as error:
        raise DumpError(f"{tokenizer} has no tokenizer that transformers can read: {error}") from error
    report = audit(groups_of(found, raw), words, expected=loss, longest=max_length)
    if evaluation is not None:
        audit_overlap(raw, read_rows(evaluation), report)
    if model is not None:
        from transformers import AutoModelForCausalLM

        from opsd.posttrain.packing import audit_packing, first_packed

        loaded = AutoModelForCausalLM.from_pretrained(model, local_files_only=True)
        packed = next(((batch, place) for batch in found if (place := first_packed(batch))), None)
        if packed is not None:
            report.findings += audit_packing(loaded, packed[0], *packed[1])
    return report


def _described(report: Report) -> dict[str, Any]:
    return {
        "rows": report.rows,
        "documents": report.documents,
        "findings": [{"kind": each.kind, "sentence": each.sentence, "advice": each.advice} for each in report.findings],
        "notes": report.notes,
    }


def _print(report: Report) -> None:
    for finding in report.findings:
        click.echo(f"{finding.kind}: {finding}")
    for note in report.notes:
        click.echo(f"note: {note}")
    if not report.findings:
        click.echo(f"{report.documents} documents and {report.rows} rows: nothing found")
