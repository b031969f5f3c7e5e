"""What is checked of a stage: its plan against what is there now, and at its end that nothing was lost or doubled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from opsd.data.identity import place_of
from opsd.data.pipeline import PipelineError, Stage
from opsd.data.records import Done, Flow, Listing, Written, damage, doubled, listing
from opsd.words import plural

_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Known:
    """The files of a run by path: those of the stages before this one, and those of this one and later ones."""

    earlier: Mapping[Path, Written]
    later: frozenset[Path] = frozenset()

    def __contains__(self, path: Path) -> bool:
        return path in self.earlier or path in self.later


def make_plan(stage: Stage, known: Known) -> dict[str, Any]:
    """The steps, tasks, inputs and outputs of the stage as they are now. Raises OSError."""
    inputs: dict[str, Any] = {}
    for place in stage.inputs:
        inputs[place] = {
            name: [size, file.checksum if (file := known.earlier.get(Path(place, name))) else stamp]
            for name, (size, stamp) in listing(place).items()
            if Path(place, name) not in known.later
        }
    return {
        "steps": [list(step) for step in stage.steps],
        "tasks": stage.tasks,
        "inputs": inputs,
        "outputs": stage.outputs,
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """How a stage differs from what it was begun with, as parts of a sentence."""
    found = []
    if before["tasks"] != now["tasks"]:
        found.append(f"it had {plural(before['tasks'], 'task')} and now has {now['tasks']:,}")
    old, new = before["steps"], now["steps"]
    if [name for name, _ in old] != [name for name, _ in new]:
        found.append(f"its steps were {', '.join(n for n, _ in old)} and are {', '.join(n for n, _ in new)}")
    else:
        found += [f"step {n} ({one[0]}) has another code or other arguments"
                  for n, (one, other) in enumerate(zip(old, new, strict=True), 1) if one != other]  # fmt: skip
    if before["outputs"] != now["outputs"]:
        found.append("it writes to other folders")
    for place in sorted({*before["inputs"], *now["inputs"]}):
        found += shortened(list(_changed(place, before["inputs"].get(place, {}), now["inputs"].get(place, {}))))
    return found


def _changed(place: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*before, *now}):
        if name not in now:
            yield f"{place}/{name} is gone"
        elif name not in before:
            yield f"{place}/{name} is new"
        elif list(before[name]) != list(now[name]):
            kind = "is shorter" if now[name][0] < before[name][0] else "has changed"
            yield f"{place}/{name} {kind}"


def shortened(sentences: Sequence[str]) -> list[str]:
    """The first few, and how many more there are."""
    left = len(sentences) - _SHOWN
    return [*sentences[:_SHOWN], *([f"{left:,} more like these"] if left > 0 else [])]


def demand_inputs(stage: Stage, known: Known, allow_copies: bool) -> None:
    """Raise PipelineError for files of earlier stages that are damaged or added, and for doubled inputs."""
    own = {file.folder for file in known.earlier.values()}
    for place in stage.inputs:
        files = listing(place)
        problems = [why for file in known.earlier.values() if file.folder == place and (why := damage(file))]
        if place in own:
            extra = [name for name in files if Path(place, name) not in known]
            problems += [f"{Path(place, name)} was written by no task of this run" for name in sorted(extra)]
        elif readers := [reader for reader in stage.readers if _place(reader) == place and "://" not in place]:
            problems += [why for reader in readers for why in _unreadable(reader, place, files)]
            problems += [] if problems or allow_copies else doubled(place, files)
        if problems:
            told = "; ".join(shortened(problems))
            raise PipelineError(f"stage {stage.number} cannot read {place}: {told}. {_remedy(problems)}")


def _unreadable(reader: Any, place: str, files: Listing) -> Iterator[str]:
    """What a reader would take for a file and is none. Raises PipelineError if there is nothing at all."""
    if reader.paths_file:
        return
    found = _listed(reader) if Path(place).is_dir() else []
    if not found:
        only = f" that matches {reader.glob_pattern}" if reader.glob_pattern else ""
        raise PipelineError(f"there is no file{only} in {place}")
    kinds = "not a file, but a pipe, or a link to a folder or to nothing"
    yield from (f"{place}/{name} is {kinds}" for name in sorted(set(found) - files.keys()))


def _listed(reader: Any) -> list[str]:
    """The files that a reader shares out among the tasks."""
    return list(reader.data_folder.list_files(recursive=reader.recursive, glob_pattern=reader.glob_pattern))


def _remedy(problems: Sequence[str]) -> str:
    if any(" has the content of " in why for why in problems):
        return "Remove what is doubled, or pass --allow-copies if it is meant"
    if any(" is not a file" in why for why in problems):
        return "Remove what is no file; for a folder elsewhere, use a reader of its own"
    return "Remove what was added; with --redo the tasks of files that are missing or damaged run again"


def demand_one_file_system(stage: Stage) -> None:
    """Raise PipelineError if an output folder is a file system of its own."""
    for place in stage.outputs:
        if Path(place).resolve().is_mount():
            raise PipelineError(
                f"stage {stage.number} writes to {place}, where another file system begins: name a folder in it, since "
                "files are made ready beside the folder and then moved"
            )


def demand_outputs(stage: Stage, known: Known) -> None:
    """Raise PipelineError if an output folder has files that the run has not written."""
    for place in stage.outputs:
        others = sorted(name for name in listing(place) if Path(place, name) not in known)
        if others:
            raise PipelineError(
                f"stage {stage.number} writes to {place}, where {plural(len(others), 'file')} such as {others[0]} "
                f"{'is' if len(others) == 1 else 'are'} not of this run: remove them, or choose another folder"
            )


def _place(reader: Any) -> str:
    return str(place_of(reader.data_folder))


def summary(stage: Stage, plan: Mapping[str, Any], now: Mapping[str, Any], records: Sequence[Done]) -> dict[str, Any]:
    """The stage as a whole: its flows, and what it took from folders and gave to them. ``now`` is its plan at its end.

    Raises PipelineError if a file was written twice, or if an input was not read exactly once or has changed.
    """
    problems = [*_written_twice(records), *_unread(stage, plan["inputs"], now["inputs"], records)]
    problems += [f"{name} while the stage ran" for name in _edited(plan["inputs"], now["inputs"])]
    if problems:
        raise PipelineError(f"stage {stage.number}: {'; '.join(shortened(problems))}")
    flows = merged(records)
    return {
        "flows": [asdict(flow) for flow in flows],
        "taken": dict(_by_folder(stage, flows, "read_file", "data_folder")),
        "given": dict(_by_folder(stage, flows, "output_filename", "output_folder")),
        "files": sum(len(done.files) for done in records),
        "bytes": sum(file.size for done in records for file in done.files),
    }


def merged(records: Sequence[Done]) -> list[Flow]:
    """The flows of all tasks together, step by step."""
    flows: list[Flow] = []
    for done in records:
        for number, flow in enumerate(done.flows):
            if number == len(flows):
                flows.append(Flow(flow.step))
            flows[number].add(flow)
    return flows


def _by_folder(stage: Stage, flows: Sequence[Flow], mark: str, attribute: str) -> Counter[str]:
    """The documents that readers took from each folder or writers put there: steps that have ``mark``."""
    total: Counter[str] = Counter()
    for step, flow in zip(stage.executor.pipeline, flows, strict=False):
        if hasattr(step, mark) and (place := place_of(getattr(step, attribute, None))) is not None:
            total[place] += flow.documents_out - flow.documents_in if mark == "read_file" else flow.documents_in
    return total


def _written_twice(records: Sequence[Done]) -> Iterator[str]:
    ranks: dict[Path, int] = {}
    for done in records:
        for file in done.files:
            if file.path in ranks:
                yield f"tasks {ranks[file.path]} and {done.rank} both write {file.path}: its name needs ${{rank}}"
            ranks[file.path] = done.rank


def _edited(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Inputs that are still there with another size or time."""
    for place, files in before.items():
        there = {name: about for name, about in now.get(place, {}).items() if name in files}
        yield from _changed(place, {name: files[name] for name in there}, there)


def _unread(
    stage: Stage, before: Mapping[str, Listing], now: Mapping[str, Listing], records: Sequence[Done]
) -> Iterator[str]:
    """Inputs of readers that no task has read, or several."""
    for reader in stage.readers:
        place = _place(reader)
        if "://" in place or reader.paths_file or reader.limit != -1:
            continue
        wanted = set(_listed(reader))
        known = before[place]
        times = Counter(name for done in records for name in done.reads.get(place, ()))
        yield from (f"no task has read {place}/{name}" for name in sorted(wanted) if not times[name])
        yield from (f"{times[name]} tasks have read {place}/{name}" for name in sorted(wanted) if times[name] > 1)
        yield from (f"{place}/{name} was added while the stage ran" for name in sorted(wanted - known.keys()))
        gone = [name for name in known.keys() - now[place].keys() if not times[name]]
        yield from (f"{place}/{name} was removed before it was read" for name in sorted(gone))


def demand_hand_over(stage: Stage, made: Mapping[str, Any], given: Mapping[str, int]) -> None:
    """Raise PipelineError if a reader of all files of a folder took other documents than writers have put there."""
    for place, taken in made["taken"].items():
        reads_all = all(
            reader.limit == -1 and not reader.skip and not reader.paths_file and not reader.glob_pattern
            for reader in stage.readers if _place(reader) == place
        )  # fmt: skip
        if place in given and reads_all and given[place] != taken:
            raise PipelineError(
                f"stage {stage.number} read {taken:,} documents from {place}, and {given[place]:,} were written there"
            )
