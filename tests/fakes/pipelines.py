"""Small pipelines of datatrove, and an engine that runs their tasks in this process.

Small pipelines of datatrove, and an engine that runs their tasks in this process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from opsd.data.pipeline import Stage, load
from opsd.data.records import Attempt, StageFolder
from opsd.data.run import Run, Tries
from opsd.data.task import Tasks

PIPELINE = """
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

LEAST = 10

def is_long(document):
    return len(document.text) > LEAST or (False, "short")

def shout(documents, rank=0, world_size=1):
    for document in documents:
        document.text = document.text.upper()
        yield document

stages = [
    LocalPipelineExecutor(
        [JsonlReader("FOLDER/raw"), LambdaFilter(is_long), JsonlWriter("FOLDER/kept", "${rank}.jsonl.gz")], tasks=3
    ),
    LocalPipelineExecutor(
        [JsonlReader("FOLDER/kept"), shout, LambdaFilter(lambda document: "7" in document.text),
         JsonlWriter("FOLDER/final", "${rank}.jsonl.gz")], tasks=2
    ),
]
"""


def make_raw(folder: Path, files: int = 5, documents: int = 40) -> None:
    """Files of documents of several lengths, some with characters of several bytes."""
    folder.mkdir(parents=True)
    for number in range(files):
        texts = ("wörter " * (index % 4) + f"{number}-{index}" for index in range(documents))
        lines = (json.dumps({"text": text, "id": text}) + "\n" for text in texts)
        (folder / f"{number:03d}.jsonl").write_text("".join(lines))


def make_pipeline(folder: Path, text: str = PIPELINE) -> Path:
    """The pipeline of two stages, with its raw data, in ``folder``."""
    if not (folder / "raw").exists():
        make_raw(folder / "raw")
    path = folder / "pipeline.py"
    path.write_text(text.replace("FOLDER", str(folder)))
    return path


class Here:
    """Runs tasks in this process; ``before`` is called with each stage, ``after`` once its tasks have run."""

    def __init__(
        self, before: Callable[[int], object] = lambda _: None, after: Callable[[], object] = lambda: None
    ) -> None:
        self.ran: list[tuple[int, int]] = []
        self._before, self._after = before, after

    def run(self, stage: Stage, folder: StageFolder, ranks: Sequence[int], tries: Tries) -> None:
        """See ``opsd.data.run.Engine``."""
        self._before(stage.number)
        tasks = Tasks(stage, folder)
        for rank in ranks:
            self.ran.append((stage.number, rank))
            attempt = tasks.run(Attempt(rank))
            if attempt.outcome == "failed":
                tries.ended(attempt)
        self._after()


def run_here(file: Path, engine: Here | None = None, *, redo: bool = False, said: list[str] | None = None) -> bool:
    """One call of the command, in this process."""
    tell = (said if said is not None else []).append
    return Run(file, file.with_suffix(""), load(file), engine or Here(), tell, redo).run()


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of all files below a folder, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
