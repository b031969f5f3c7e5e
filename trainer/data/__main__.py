"""``python -m opsd.trainer.data``: make token shards from text, or ``propose`` weights for a mixture of them."""

from __future__ import annotations

import codecs
import json
import math
import os
import sys
from collections import Counter
from pathlib import Path

import click
from tokenizers import Tokenizer

from opsd import exitcodes
from opsd.progress import shown
from opsd.trainer.data.build import BuildTask, begun, build, limited, locked, overwriting, put_in_place, tidy
from opsd.trainer.data.propose import propose, read_run
from opsd.trainer.data.shards import INDEX, TOKENIZER, DataError, Framing, Index, summary
from opsd.trainer.data.texts import FIELD, SUFFIXES, Reading, find_files, read_texts
from opsd.trainer.data.tokenize import TRAINING_BYTES, framing_of, load_tokenizer, train_tokenizer
from opsd.words import plural, with_remedy

USAGE, INTERRUPTED = 2, 3


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExit codes:\n"
    "  0   done\n"
    "  1   the folder cannot be written\n"
    "  2   a source, the tokenizer or --out cannot be used\n"
    "  3   interrupted\n"
    "  74  the disk or the quota is full",
)
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder of the corpus.")
@click.option("--tokenizer", "tokenizer_file", type=click.Path(path_type=Path), help="Use this tokenizer.json.")
@click.option(
    "--vocab",
    type=click.IntRange(257),
    default=2048,
    show_default=True,
    help="Ids of the tokenizer that is trained otherwise.",
)
@click.option("--separator", default="", metavar="TOKEN", help="Ends documents; by default the tokenizer's own EOS.")
@click.option("--suffix", "suffixes", multiple=True, default=SUFFIXES, show_default=True, help="Taken from folders.")
@click.option("--field", default=FIELD, show_default=True, help="Where JSON, CSV, Parquet and Arrow have the text.")
@click.option("--encoding", default="utf-8", show_default=True, help="Of text without a byte order mark.")
@click.option("--skip-unreadable", is_flag=True, help="Leave out, and count, files that cannot be read.")
@click.option(
    "--max-bytes",
    type=click.IntRange(1),
    default=1 << 62,
    help="Use the first files that together have no more than this.",
)
@click.option(
    "--shard-tokens", type=click.IntRange(1), default=100_000_000, show_default=True, help="Tokens in a shard, about."
)
@click.option("--workers", type=click.IntRange(0), default=0, help="Processes; 0 is one per core.")
@click.option("--overwrite", is_flag=True, help="Replace a corpus that is there already.")
def main(
    sources: tuple[Path, ...],
    out: Path,
    tokenizer_file: Path | None,
    vocab: int,
    separator: str,
    suffixes: tuple[str, ...],
    field: str,
    encoding: str,
    skip_unreadable: bool,
    max_bytes: int,
    shard_tokens: int,
    workers: int,
    overwrite: bool,
) -> None:
    """Tokenise SOURCES, files or folders of them, into a corpus of shards.

    Reads text, JSON, CSV, Parquet and Arrow, also compressed with gzip, bzip2, xz or zstd. A file that cannot be read
    is refused. At the end it prints what was read, and what was dropped and why. Interrupted, it goes on where it was
    when it is run again. With ``propose`` in place of SOURCES it proposes weights; see ``propose --help``.
    """
    reading = Reading(field, _known(encoding), skip_unreadable)
    others: Counter[str] = Counter()
    found = find_files(sources, tuple(suffix.lower() for suffix in suffixes), others, reading)
    files = list(limited(found, max_bytes))
    with locked(out):
        tidy(out)
        if (out / INDEX).exists() and not overwrite:
            raise DataError(f"{out} already has a corpus; choose another folder or pass --overwrite")
        resumed = out / TOKENIZER if begun(out) and not overwrite else None
        tokenizer = _tokenizer(tokenizer_file or resumed, files, reading, vocab)
        framing = framing_of(tokenizer, tokenizer_file, separator)
        folder = overwriting(out) if overwrite else out
        index = _built(folder, files, tokenizer, (reading, framing, shard_tokens), workers)
        if folder != out:
            put_in_place(out)
    tokens, documents = sum(s.tokens for s in index.shards), sum(s.documents for s in index.shards)
    click.echo(
        f"{out}: {plural(documents, 'document')}, {tokens:,} tokens, {index.vocab:,} ids, "
        f"{plural(len(index.shards), 'shard')}"
    )
    left_out = dict(sorted(others.items()))
    if beyond := len(found) - len(files):
        left_out["files beyond --max-bytes"] = beyond
    for name, value in {**summary(index), **left_out}.items():
        click.echo(f"  {value:>15,} {name}{' left out' if name in left_out else ''}")


def _built(
    folder: Path, files: list[Path], tokenizer: Tokenizer, options: tuple[Reading, Framing, int], workers: int
) -> Index:
    """Build the corpus with a progress line; ``options`` are how to read, the framing, and the tokens of a shard."""
    cores = len(os.sched_getaffinity(0))
    workers = workers or cores
    total, done = sum(path.stat().st_size for path in files), 0
    with shown("tokenising") as look:
        look(0, total)

        def advance(size: int) -> None:
            nonlocal done
            done += size
            look(done, total)

        job = BuildTask(folder, *options, max(1, cores // workers))
        return build(files, tokenizer, job, workers, advance)


def _known(encoding: str) -> str:
    try:
        "a".encode(encoding)
        return codecs.lookup(encoding).name
    except LookupError as error:  # also if it encodes no text, as rot13
        raise DataError(f"--encoding {encoding}: not known; for instance utf-8, utf-16 or latin-1") from error


def _tokenizer(file: Path | None, files: list[Path], reading: Reading, vocab: int) -> Tokenizer:
    """The given one, or a new one trained on the beginning of the text."""
    if file is not None:
        return load_tokenizer(file)
    return train_tokenizer(read_texts(files, TRAINING_BYTES, reading), vocab)


@click.command("propose", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--target", "targets", multiple=True, metavar="SET=SHARE", help="Of the loss; by default all sets.")
@click.option("--seed", default=0, show_default=True, help="Of the mixtures that are drawn.")
def propose_weights(runs: tuple[Path, ...], targets: tuple[str, ...], seed: int) -> None:
    """Propose weights of sources from RUNS, the folders of small runs with different mixtures.

    Their last losses on the sets of evaluation.perplexity are fitted by a linear model. Prints weights for a stage, the
    predicted loss and how far such predictions were off; no run is changed. Exit code 2: the runs do not tell as much.
    """
    shares = {}
    for target in targets:
        name, equals, share = target.partition("=")
        try:
            shares[name] = float(share)
        except ValueError:
            equals = ""
        if not equals or not 0 < shares[name] < math.inf:
            raise DataError(f"--target {target}: expected SET=SHARE with a number above 0, for instance code=0.5")
    found = propose([read_run(folder) for folder in runs], shares, seed)
    weights = ", ".join(f"{json.dumps(name)} = {weight}" for name, weight in found.weights.items() if weight)
    click.echo(f"weights = {{ {weights} }}")
    click.echo(
        f"# predicted loss {found.predicted:.4f}, best run {found.best:.4f}; predictions of runs from the others were "
        f"{found.error:.4f} off"
    )
    if found.best - found.predicted <= found.error:
        click.echo("opsd: the gain is within the error of the predictions; more runs would tell", err=True)


if __name__ == "__main__":
    proposing = sys.argv[1:2] == ["propose"]
    try:
        if proposing:
            propose_weights(sys.argv[2:], standalone_mode=False)
        else:
            main(standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"opsd: {error.format_message()}", err=True)
        sys.exit(USAGE)
    except click.Abort:
        click.echo("opsd: interrupted; run the same command again to go on", err=True)
        sys.exit(INTERRUPTED)
    except DataError as error:
        click.echo(f"opsd: {error}", err=True)
        sys.exit(USAGE)
    except OSError as error:
        where = "" if error.filename else "the output cannot be written: "
        click.echo(f"opsd: {where}{with_remedy(error)}", err=True)
        sys.exit(exitcodes.of_error(error))
