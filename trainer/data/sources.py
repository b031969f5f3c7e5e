"""The corpora that a run reads, found and checked before it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from opsd.checkpoints.manifest import checksum
from opsd.trainer.data.shards import (
    Corpus,
    DataError,
    Index,
    find_index,
    framed_shares,
    place,
    sequence_counts,
    verify,
)
from opsd.trainer.data_settings import Cut, DataSettings


@dataclass(frozen=True, slots=True)
class Source:
    """A corpus: its index, its folder, and the folder of a copy on slower storage, if any."""

    name: str
    index: Index
    folder: Path
    fallback: Path | None = None


def open_sources(data: DataSettings, vocab: int, *, part: int = 0, parts: int = 1) -> dict[str, Source]:
    """The sources of the run by name, "." for a single corpus. Raises DataError.

    All file sizes and the content of every ``parts``-th file match the indexes. All sources were made with the same
    tokenizer, which has at most ``vocab`` ids.
    """
    sources = {name: _open(data, name) for name in data.sources}
    check_tokenizers(list(sources.values()), data.tokenizer)
    check_templates(list(sources.values()), data.chat_template)
    for source in sources.values():
        if source.index.vocab > vocab:
            raise DataError(f"{source.folder} has {source.index.vocab} token ids, model.vocab is {vocab}")
        content = data.verify == "checksum"
        verify(source.folder, source.index, content=content, part=part, parts=parts, fallback=source.fallback)
        if part == 0:
            check_framing(source)
    for name, size in sizes(sources, data).items():
        if not size:
            cut = data.cuts()[name]
            lack = "no document of" if cut.within else "fewer tokens than one sequence of"
            raise DataError(f"{sources[cut.source].folder} has {lack} {cut.length}{' tokens' if cut.within else ''}")
    return sources


def sizes(sources: Mapping[str, Source], data: DataSettings) -> dict[str, int]:
    """The number of sequences in each of ``data.cuts()``."""
    return {name: _size(sources[cut.source], cut) for name, cut in data.cuts().items()}


def _size(source: Source, cut: Cut) -> int:
    if cut.within:
        return Corpus(source.folder, source.index, cut.length, source.fallback, within=True).sequences
    return sum(sequence_counts(source.index, cut.length))


def check_tokenizers(sources: Sequence[Source], wanted: str) -> None:
    """Raise DataError unless all sources were made with the same tokenizer, and with the file ``wanted`` if given.

    The tokens around documents are the same too.
    """
    first = sources[0]
    for source in sources[1:]:
        if source.index.tokenizer.checksum != first.index.tokenizer.checksum:
            raise DataError(
                f"{source.folder} and {first.folder} have been made with different tokenizers; "
                "make one of them again with the other's tokenizer.json"
            )
        if (source.index.framing.begin, source.index.framing.end) != (
            first.index.framing.begin,
            first.index.framing.end,
        ):
            raise DataError(
                f"the documents of {source.folder} begin and end with {_tokens(source)}, those of {first.folder} with "
                f"{_tokens(first)}; make one of them again with the other's --separator"
            )
    if wanted:
        from opsd.trainer.data.tokenize import add_separator, load_tokenizer  # only few runs need the library

        made_with = load_tokenizer(place(first.folder, first.index.tokenizer, first.fallback))
        given = load_tokenizer(Path(wanted))
        add_separator(given, first.index.framing.separator)
        if given.to_str() != made_with.to_str():
            raise DataError(f"{first.folder} has been made with another tokenizer than data.tokenizer {wanted}")


def check_templates(sources: Sequence[Source], wanted: str) -> None:
    """Raise DataError if sources of chats have different chat templates, or another one than the file ``wanted``."""
    chats = [source for source in sources if source.index.framing.template]
    for source in chats[1:]:
        if source.index.framing.template != chats[0].index.framing.template:
            raise DataError(
                f"the chats of {source.folder} and {chats[0].folder} have been rendered with different chat templates; "
                "make one of them again with the other's"
            )
    if not wanted:
        return
    try:
        template = checksum(Path(wanted))
    except OSError as error:
        raise DataError(f"data.chat_template {wanted} cannot be read: {error.strerror}") from error
    if not chats:
        raise DataError(f"no source of {sources[0].folder} has chats; leave out data.chat_template {wanted}")
    if chats[0].index.framing.template != template:
        raise DataError(
            f"the chats of {chats[0].folder} have been rendered with another chat template than data.chat_template "
            f"{wanted}; make them again with it"
        )


def check_framing(source: Source) -> None:
    """Raise DataError if documents do not begin and end with the tokens that the index says, in a sample of them.

    A BOS that was dropped, or a file of shards of another tokenizer, is seen in the loss only late.
    """
    from opsd.trainer.data.tokenize import ids, load_tokenizer

    framing = source.index.framing
    tokenizer = load_tokenizer(place(source.folder, source.index.tokenizer, source.fallback))
    begin, end = ids(tokenizer, framing.begin), ids(tokenizer, framing.end)
    for verb, tokens, share in zip(
        ("begin", "end"),
        (framing.begin, framing.end),
        framed_shares(source.folder, source.index, begin, end, source.fallback),
        strict=True,
    ):
        if share < 1:
            raise DataError(
                f"{source.folder}: {share:.1%} of its documents {verb} with {' '.join(tokens)}, and by its index all "
                "do; make it again with `python -m opsd.trainer.data`"
            )


def made_differently(sources: Sequence[Source]) -> str:
    """How the sources differ in the code that made them, "" if they do not or if that is not known."""
    known = [source for source in sources if source.index.made_by]
    for source in known[1:]:
        for name, value in known[0].index.made_by.items():
            if name != "opsd" and source.index.made_by.get(name) != value:
                what = "the code" if name == "code" else f"the version of {name}"
                return f"{source.folder} and {known[0].folder} differ in {what} that tokenised them"
    return ""


def _tokens(source: Source) -> str:
    return " and ".join((*source.index.framing.begin, *source.index.framing.end))


def _open(data: DataSettings, name: str) -> Source:
    folder, fallback = Path(data.shards, name).resolve(), Path(data.fallback, name).resolve() if data.fallback else None
    return Source(name, find_index(folder, fallback), folder, fallback)
