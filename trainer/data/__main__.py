"""``python -m trainer.data``: make token shards from text."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from trainer.data.shards import INDEX, DataError
from trainer.data.tokenize import TRAINING_BYTES, find_files, load_tokenizer, make_corpus, read_texts, train_tokenizer

FAILED, USAGE = 1, 2


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder of the corpus.")
@click.option("--tokenizer", "tokenizer_file", type=click.Path(path_type=Path), help="Use this tokenizer.json.")
@click.option("--vocab", default=2048, show_default=True, help="Ids of the tokenizer that is trained otherwise.")
@click.option("--suffix", "suffixes", multiple=True, default=(".txt", ".md", ".py"), show_default=True)
@click.option("--max-bytes", default=1 << 62, help="Stop before the text exceeds this.")
@click.option("--shard-tokens", default=100_000_000, show_default=True, help="Tokens in a shard, about.")
@click.option("--overwrite", is_flag=True, help="Replace a corpus that is there already.")
def main(
    sources: tuple[Path, ...],
    out: Path,
    tokenizer_file: Path | None,
    vocab: int,
    suffixes: tuple[str, ...],
    max_bytes: int,
    shard_tokens: int,
    overwrite: bool,
) -> None:
    """Tokenise SOURCES, text files or folders of them, into a corpus of shards.

    Exit codes: 0 done; 1 the folder cannot be written; 2 the sources, the tokenizer or the folder cannot be used.
    """
    if (out / INDEX).exists():
        if not overwrite:
            raise DataError(f"{out} already has a corpus; choose another folder or pass --overwrite")
        (out / INDEX).unlink()
    files = find_files(sources, suffixes)
    if tokenizer_file is not None:
        tokenizer = load_tokenizer(tokenizer_file)
    else:
        tokenizer = train_tokenizer(read_texts(files, min(max_bytes, TRAINING_BYTES)), vocab)
    index = make_corpus(read_texts(files, max_bytes), tokenizer, out, shard_tokens)
    tokens, documents = sum(s.tokens for s in index.shards), sum(s.documents for s in index.shards)
    click.echo(f"{out}: {documents:,} documents, {tokens:,} tokens, {index.vocab:,} ids, {len(index.shards)} shards")


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        click.echo(f"trainer.data: {error}", err=True)
        sys.exit(USAGE)
    except OSError as error:
        click.echo(f"trainer.data: {error.filename}: {error.strerror}", err=True)
        sys.exit(FAILED)
