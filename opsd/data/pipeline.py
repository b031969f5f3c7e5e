"""The file of a pipeline: ``stages``, a list of datatrove's executors, as anybody would run them without opsd."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from opsd import pip_install
from opsd.data.identity import OWN, digest, place_of
from opsd.words import first_line, reason

_DEEPEST: Final = 4


class PipelineError(ValueError):
    """The pipeline cannot be run; the message is one sentence that says what to do."""


@dataclass(frozen=True)
class Stage:
    """One executor of a pipeline; ``number`` counts from 1."""

    number: int
    executor: Any

    @property
    def name(self) -> str:
        """The name of the job, if it has one, or the names of the steps."""
        given = getattr(self.executor, "job_name", "")
        return given if given and given != "data_processing" else ", ".join(map(name_of, self.executor.pipeline))

    @property
    def tasks(self) -> int:
        """The world size."""
        return int(self.executor.world_size)

    @cached_property
    def steps(self) -> list[tuple[str, str]]:
        """Name and digest of each step."""
        return [(name_of(step), digest(step)) for step in self.executor.pipeline]

    @cached_property
    def outputs(self) -> list[str]:
        """The folders that it writes to."""
        return sorted({place for name, place in self._folders() if _is_output(name)})

    @cached_property
    def inputs(self) -> list[str]:
        """The folders that it reads."""
        return sorted({place for name, place in self._folders() if not _is_output(name)})

    def _folders(self) -> Iterator[tuple[str, str]]:
        for step in self.executor.pipeline:
            for name, folder in folders_of(step):
                yield name, str(place_of(folder))

    @property
    def readers(self) -> list[Any]:
        """The steps that give each task a share of the files of a folder."""
        return [step for step in self.executor.pipeline if hasattr(step, "read_file") and hasattr(step, "data_folder")]


def _is_output(name: str) -> bool:
    return name.startswith("output")


def name_of(step: object) -> str:
    """The name of a step's class, or of the function."""
    name = getattr(step, "__name__", None) or type(step).__name__
    return "function" if name == "<lambda>" else str(name)


def folders_of(value: object, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The folders in the attributes of a step and of the steps in them, such as a writer of what is left out.

    Those with "local" in their names, such as ``local_working_dir``, are for the files of a task while it runs.
    """
    for name, each in getattr(value, "__dict__", {}).items():
        if place_of(each) is not None:
            if "local" not in name:
                yield name, each
        elif depth < _DEEPEST and hasattr(each, "__dict__") and name not in ("stats", "output_mg", "fs"):
            yield from folders_of(each, depth + 1)


def load(path: Path) -> list[Stage]:
    """Run the file and take its ``stages``. Raises PipelineError."""
    try:
        import datatrove.io
        from datatrove.executor.base import PipelineExecutor
    except ImportError as error:
        raise PipelineError(f"pipelines need datatrove: {pip_install('data')} ({error})") from error
    datatrove.io.DataFolder.cachable = False  # each step has a folder of its own, which can be led elsewhere
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with _not_run():
            found = runpy.run_path(str(path), run_name=OWN).get("stages")
    except PipelineError as error:
        raise PipelineError(f"{path} {error}") from None
    except OSError as error:
        raise PipelineError(f"{error.filename or path} cannot be read: {reason(error)}") from error
    except (Exception, SystemExit) as error:
        raise PipelineError(f"{path} fails: {type(error).__name__}: {first_line(str(error))}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    if not isinstance(found, Sequence) or not found or not all(isinstance(each, PipelineExecutor) for each in found):
        raise PipelineError(
            f"{path} has no `stages`: set it to the list of its executors, in the order in which they run"
        )
    stages = [Stage(number, executor) for number, executor in enumerate(found, 1)]
    for stage in stages:
        _check(stage)
    return stages


@contextmanager
def _not_run() -> Iterator[None]:
    """Refuse executors that the file runs itself, which would run without proof."""
    from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor

    def refuse(executor: Any) -> None:
        raise PipelineError('calls run() of an executor: do that below `if __name__ == "__main__":` only')

    kinds = (LocalPipelineExecutor, SlurmPipelineExecutor)
    runs = [kind.run for kind in kinds]
    for kind in kinds:
        kind.run = refuse
    try:
        yield
    finally:
        for kind, run in zip(kinds, runs, strict=True):
            kind.run = run


def _check(stage: Stage) -> None:
    """Raise PipelineError for folders that cannot be proved."""
    for place in stage.outputs:
        if "://" in place:
            raise PipelineError(
                f"stage {stage.number} writes to {place}, an object store: write to a folder that all nodes see, "
                "and copy that"
            )
    for step in stage.executor.pipeline:
        if hasattr(step, "upload_files"):  # datatrove's writers to the Hub of Hugging Face
            raise PipelineError(
                f"stage {stage.number}: {name_of(step)} uploads while its task runs: write to a folder that all nodes "
                "see, and upload that"
            )
    allowed = {place for step in stage.executor.pipeline if getattr(step, "in_place", False) for _, place in _of(step)}
    for place in stage.outputs:
        for other in stage.inputs:
            if other not in allowed and (_is_within(place, other) or _is_within(other, place)):
                raise PipelineError(
                    f"stage {stage.number} reads {other} and writes to {place}: give it a folder outside of that"
                )


def _of(step: object) -> Iterator[tuple[str, str]]:
    return ((name, str(place_of(folder))) for name, folder in folders_of(step))


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + os.sep)
