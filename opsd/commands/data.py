"""``opsd data``: pipelines of datatrove with proof of what is done, and what there is to know about their data."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from opsd import exitcodes
from opsd.commands.interrupts import become, ended_at_once
from opsd.commands.options import Group, exit_codes, option, options
from opsd.commands.output import fail, output_console, plain_table, warn, written
from opsd.data.pipeline import PipelineError, load
from opsd.data.run import RETRIES, Engine
from opsd.slurm.connect import choose
from opsd.slurm.port import SlurmError, SlurmMissing
from opsd.words import count, plural, with_remedy

if TYPE_CHECKING:
    from opsd.data.tokenizers import Compared, Cost

_FILE = click.Path(path_type=Path, dir_okay=False)

run_options = options(
    click.argument("file", type=_FILE),
    option("--dir", "root", type=click.Path(path_type=Path, file_okay=False),
           help="Folder of the run's state; by default FILE without .py. All nodes must see it."),
)  # fmt: skip


@click.group(cls=Group)
def data() -> None:
    """Run datatrove pipelines so that nothing is skipped and nothing is read twice.

    FILE is a Python file that defines `stages`, a list of datatrove's executors. docs/data.md describes it.
    """
    program = Path(sys.argv[0])
    if sys.flags.hash_randomization and (program.name == "opsd" or program.parts[-2:] == ("opsd", "__main__.py")):
        # Digests, and tasks that are repeated, need sets in the same order in each process.
        os.environ["PYTHONHASHSEED"] = "0"
        become([sys.executable, *sys.orig_argv[1:]])


@data.command(
    epilog=exit_codes(
        {
            0: "all stages are done",
            1: "a task was given up, or Slurm refused",
            2: "FILE or RUN cannot be used, or something has changed or is missing",
            3: "interrupted; the same command goes on",
            74: "the disk or the quota is full",
        }
    )
)  # fmt: skip
@run_options
@option("--local", is_flag=True, help="Run on this machine, not as arrays of Slurm.")
@option("--partition", help="Where arrays run; by default the executor's partition, or Slurm's default.")
@option("--sbatch", "sbatch", multiple=True, metavar="OPTION", help="Another option of sbatch for arrays.")
@option("--tasks-per-job", type=click.IntRange(1), help="Tasks that a job of an array runs, one after the other.")
@option(
    "--workers",
    type=click.IntRange(1),
    help="Tasks at once; by default those of the executor, on this machine at most one for each core.",
)
@option(
    "--retries",
    type=click.IntRange(0),
    default=RETRIES,
    help="How often a task that failed is tried again, unless it fails twice in a row with the same error.",
)
@option(
    "--redo", is_flag=True, help="Run again what has changed and what depends on it, and tasks whose files are damaged."
)
@option("--allow-copies", is_flag=True, help="Accept inputs that have the same content as another one.")
@option("--beside", type=click.Path(path_type=Path, file_okay=False), metavar="RUN",
        help="Folder of the run that the data is for. The cost is noted there, for its report and pages.")  # fmt: skip
def run(
    file: Path, root: Path | None, retries: int, redo: bool, allow_copies: bool, beside: Path | None, **given: Any
) -> int:
    """Run the stages of FILE, one after the other: as arrays of Slurm, or here if there is no Slurm.

    Repeat it to go on. A task is done once its files are on the disk, with the digest of code, arguments, inputs and
    number of tasks. If one of them has changed, the command says what, and runs nothing.
    """
    from opsd.data.run import Run, held

    root = root or file.with_suffix("")
    if beside is not None and not (beside.is_dir() and os.access(beside, os.W_OK)):
        fail(f"--beside {beside}: no folder to write to; create it, or name the folder of the run", exitcodes.USAGE)
    try:
        with ended_at_once():
            stages = load(file)
        pipeline = Run(file, root, stages, _engine(root, given), warn, redo, allow_copies, retries)
        with held(root):
            complete = pipeline.run()
            found = _status(root)
            if beside is not None:
                _note(beside, found)
            _show(found)
    except PipelineError as error:
        fail(str(error), exitcodes.USAGE)
    except SlurmError as error:
        fail(f"{error}; the same command goes on")
    except KeyboardInterrupt:
        warn("interrupted; the same command goes on")
        return exitcodes.INTERRUPTED
    except OSError as error:
        fail(with_remedy(error), exitcodes.of_error(error))
    if complete:
        return exitcodes.OK
    return exitcodes.NO_SPACE if pipeline.full else exitcodes.FAILED


@data.command(epilog=exit_codes({0: "told", 1: "FILE cannot be written", 2: "there is no such run"}))
@run_options
@option("--json", "json_file", type=_FILE, help="Write JSON to FILE, - for stdout.")
def status(file: Path, root: Path | None, json_file: Path | None) -> int:
    """Tasks, documents at each step, time left and cost of the run of FILE."""
    found = _status(root or file.with_suffix(""))
    if json_file is None:
        _show(found)
    elif not written(json_file, json.dumps(found, indent=1) + "\n", "the status"):
        return exitcodes.FAILED
    return exitcodes.OK


@data.command(
    epilog=exit_codes({0: "told", 1: "a file cannot be written", 2: "a tokenizer or a sample cannot be used"})
)
@click.argument("tokenizers", nargs=-1, required=True, type=click.Path(path_type=Path))
@option(
    "--sample",
    "samples",
    multiple=True,
    required=True,
    metavar="LANGUAGE=PATH",
    help="Texts of a language: a file or a folder, as python -m opsd.trainer.data reads them.",
)
@option("--bytes", "most", type=click.IntRange(1), default=2_000_000, help="Of each sample that are read.")
@option("--model", default="", metavar="CONFIG", help="Plan the run CONFIG with each vocabulary, as opsd plan does.")
@option("--gpus", type=click.IntRange(1), default=8, help="H100s of that plan.")
@option("--json", "json_file", type=_FILE, help="Write JSON to FILE, - for stdout.")
@option("--chart", type=_FILE, help="Write bytes per token by language as SVG.")
def tokenizers(
    tokenizers: tuple[Path, ...],
    samples: tuple[str, ...],
    most: int,
    model: str,
    gpus: int,
    json_file: Path | None,
    chart: Path | None,
) -> int:
    """Compare TOKENIZERS, files or folders of a tokenizer.json, on samples of languages.

    Words are separated by spaces. Fertility is tokens for each word, continued the share of words of several tokens.
    Where words have no spaces these two are left out. With --model it tells what each vocabulary costs: a tokenizer of
    fewer bytes a token needs more tokens for the same text.
    """
    from opsd.data.tokenizers import bars, compare, sample_of
    from opsd.trainer.config import ConfigError
    from opsd.trainer.data.shards import DataError

    paths = dict(map(_sample, samples))
    if len(paths) < len(samples):
        raise click.UsageError("--sample names a language twice; put its texts into one folder")
    try:
        texts = {language: sample_of(Path(path), most) for language, path in paths.items()}
        found = compare(tokenizers, texts)
        costs = []
        if model:
            from opsd.data.tokenizers import costs as costs_of

            costs = costs_of(model, gpus, found)
    except (DataError, ConfigError) as error:
        fail(str(error), exitcodes.USAGE)
    groups = {language: {each.name: each.by_language[language].bytes_per_token for each in found} for language in texts}
    if chart is not None and not written(chart, bars("bytes per token", groups), "the chart"):
        return exitcodes.FAILED
    if json_file is not None:
        document = [
            {"tokenizer": each.name, "ids": each.ids,
             "languages": {language: asdict(figures) | {"bytes_per_token": figures.bytes_per_token}
                           for language, figures in each.by_language.items()},
             **({"cost": asdict(costs[number])} if costs else {})}
            for number, each in enumerate(found)
        ]  # fmt: skip
        if not written(json_file, json.dumps(document, indent=1) + "\n", "the comparison"):
            return exitcodes.FAILED
    if str(json_file) != "-":
        _show_tokenizers(found, costs, model)
    return exitcodes.OK


@data.command(
    epilog=exit_codes({0: "no document overlaps", 1: "some do, or FILE cannot be written", 2: "an input is unusable"})
)  # fmt: skip
@click.argument("texts", nargs=-1, required=True, type=click.Path(path_type=Path))
@option(
    "--evaluations", metavar="CONFIG", help="Look for the evaluation sets of the run CONFIG, a TOML file or preset."
)
@option(
    "--sample", type=click.Path(path_type=Path), help="Look for near-duplicates of the documents of a file or folder."
)
@option(
    "--report",
    "report_file",
    type=_FILE,
    required=True,
    help="Write the documents that overlap to FILE, as JSON lines.",
)
def overlap(texts: tuple[Path, ...], evaluations: str | None, sample: Path | None, report_file: Path) -> int:
    """Report documents of TEXTS that overlap with a run's evaluation sets, or nearly repeat those of a sample.

    Nothing is removed. A document overlaps with an item of an evaluation set if 13 words in a row are the same.
    Near-duplicates are found by datatrove's MinHash. Each line of the report has both texts.
    """
    from opsd.data.overlap import LEAST_WORDS, Evaluations, NearDuplicates, evaluation_items, report
    from opsd.plan.source import read
    from opsd.progress import tracked
    from opsd.trainer.config import ConfigError
    from opsd.trainer.data.shards import DataError, Tally
    from opsd.trainer.data.texts import find_files, read_texts

    if evaluations is None and sample is None:
        raise click.UsageError("nothing to look for: give --evaluations, --sample or both")
    looked, near, tally = None, None, Tally()
    try:
        if evaluations is not None:
            looked = Evaluations(evaluation_items(read(evaluations, (), None, None)))
            if not len(looked):
                raise DataError(
                    f"{evaluations}: its [evaluation] has no text of at least {LEAST_WORDS} words to look for"
                )
        if sample is not None:
            near = NearDuplicates(read_texts(find_files([sample])))
            if not near.sample:
                raise DataError(f"{sample} has no document to look for")
        documents = tracked(read_texts(find_files(texts), tally=tally), "comparing", "documents")
        lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in report(documents, looked, near)]
    except (DataError, ConfigError) as error:
        fail(str(error), exitcodes.USAGE)
    if not tally.documents:
        fail(f"there is no document in {', '.join(map(str, texts))}", exitcodes.USAGE)
    if looked is not None and looked.short:
        short = plural(len(looked.short), "text")
        warn(f"{short} of evaluation sets too short to be looked for (fewer than {LEAST_WORDS} words)")
    if not written(report_file, "".join(lines), "the report"):
        return exitcodes.FAILED
    overlaps = "overlaps" if len(lines) == 1 else "overlap"
    click.echo(f"{len(lines):,} of {plural(tally.documents, 'document')} {overlaps}; see {report_file}")
    return exitcodes.FAILED if lines else exitcodes.OK


@data.command(epilog=exit_codes({0: "told", 2: "CONFIG or its shards cannot be used"}))
@click.argument("config")
@option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one setting of the run.")
@option(
    "--length",
    "lengths",
    multiple=True,
    type=click.IntRange(2),
    help="Tokens from which on a document is long; "
    "by default 4096, 8192, 32768 and 131072, and the sequences of the stages.",
)
def lengths(config: str, overrides: tuple[str, ...], lengths: tuple[int, ...]) -> int:
    """How much of the sources of the run CONFIG is in long documents, and what its stages draw of it.

    A stage with long_documents draws samples that lie in one document each. Epochs tell how often it repeats them.
    """
    from opsd.data.lengths import look
    from opsd.trainer.config import ConfigError
    from opsd.trainer.config import load as load_run
    from opsd.trainer.data.shards import DataError

    try:
        found, drawn = look(load_run(config, overrides), lengths)
    except (ConfigError, DataError) as error:
        fail(str(error), exitcodes.USAGE)
    except OSError as error:
        fail(with_remedy(error), exitcodes.USAGE)
    table = plain_table("source", "documents", "tokens", *(f">= {length:,}" for length in found[0].long))
    for each in found:
        shares = (f"{share:.1%}" for share in each.long.values())
        table.add_row(escape(each.source), f"{each.documents:,}", count(each.tokens), *shares)
    output_console().print(table)
    table = plain_table("from step", "source", "sequence", "within documents", "samples", "available", "epochs")
    for row in drawn:
        table.add_row(
            str(row.start), escape(row.source), f"{row.sequence:,}", "yes" if row.within else "no",
            f"{row.samples:,}", f"{row.available:,}", f"{row.epochs:.2f}",
        )  # fmt: skip
    click.echo()
    output_console().print(table)
    return exitcodes.OK


def _sample(text: str) -> tuple[str, str]:
    language, equals, path = text.partition("=")
    if not language or not equals or not path:
        raise click.UsageError(f"--sample {text}: expected LANGUAGE=PATH, for instance de=texts/german")
    return language, path


def _show_tokenizers(found: Sequence[Compared], costs: Sequence[Cost], model: str) -> None:
    table = plain_table("tokenizer", "ids", "language", "bytes/token", "fertility", "continued", "round trip")
    for each in found:
        for language, figures in each.by_language.items():
            fertility = "-" if figures.fertility is None else f"{figures.fertility:.2f}"
            continued = "-" if figures.continued is None else f"{figures.continued:.1%}"
            table.add_row(
                escape(each.name), f"{each.ids:,}", escape(language), f"{figures.bytes_per_token:.2f}", fertility,
                continued, f"{figures.round_trip:.1%}",
            )  # fmt: skip
    output_console().print(table)
    if not costs:
        return
    table = plain_table(
        "tokenizer", "embedding parameters", "of all", "tokens for the same text", "GPU-hours", "memory"
    )
    for each, cost in zip(found, costs, strict=True):
        table.add_row(
            escape(each.name), count(cost.embeddings), f"{cost.share:.1%}", count(cost.tokens),
            "-" if cost.gpu_hours is None else f"{cost.gpu_hours:,.1f}",
            cost.problem or f"{cost.memory_gib:.1f} GiB",
        )  # fmt: skip
    click.echo(f"\nthe run {model}, by its plan:")
    output_console().print(table)


@data.command(hidden=True)
@click.argument("root", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("stage", type=int)
@click.argument("array")
def task(root: Path, stage: int, array: str) -> int:
    """Run the tasks of one job of an array."""
    from opsd.data.array import run_job

    try:
        return run_job(root, stage, array, os.environ)
    except PipelineError as error:
        fail(str(error), exitcodes.USAGE)


def _engine(root: Path, given: dict[str, Any]) -> Engine:
    """Slurm if it is here and --local is not given."""
    from opsd.data.array import Arrays
    from opsd.data.local import Local

    if not given["local"]:
        slurm = choose().slurm
        try:
            slurm.configuration()
        except SlurmMissing as error:
            warn(f"tasks run on this machine: {error}")
        else:
            return Arrays(
                root, slurm, warn, partition=given["partition"] or "", options=given["sbatch"],
                limit=given["workers"] or 0, per_job=given["tasks_per_job"] or 0,
            )  # fmt: skip
    return Local(root, given["workers"] or 0)


def _status(root: Path) -> dict[str, Any]:
    from opsd.data.status import status as status_of

    try:
        return status_of(root)
    except PipelineError as error:
        fail(str(error), exitcodes.USAGE)


def _note(folder: Path, found: dict[str, Any]) -> None:
    """Note the cost of the pipeline in the folder of the run that the data is for. Raises OSError."""
    from opsd.ledger.beside import DataRun, note

    tasks, done = (sum(stage[name] for stage in found["stages"]) for name in ("tasks", "done"))
    note(folder, DataRun(found["pipeline"], tasks, done, **found["cost"]), time.time())


def _show(found: dict[str, Any]) -> None:
    from opsd.data.status import funnel, headline

    for stage in found["stages"]:
        click.echo(headline(stage))
        table = plain_table("step", "documents in", "out", "dropped", "bytes in", "out", "", "why dropped")
        for row in funnel(stage):
            table.add_row(*row)
        output_console().print(table)
    cost = found["cost"]
    click.echo(
        f"cost: {cost['core_hours']:.3f} core-hours, of which {cost['lost_core_hours']:.3f} were lost to retries"
    )
