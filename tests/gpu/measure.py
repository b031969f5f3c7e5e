"""What the trainer reaches on the GPU of this machine: ``make bench-gpu`` writes it to ``tests/gpu/results``.

Each part is a run of the trainer itself, on documents of realistic lengths, and its numbers are those of its
``metrics.jsonl``: medians over the steps after the first five, which compile. A part that fails, lacks memory or is
out of time says so in the results, which are written after each part.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from shapes import ON_GPU, PARTS, PRESET, Part

from opsd.trainer import counts
from opsd.trainer.config import load
from opsd.trainer.data.tokenize import make_corpus, train_tokenizer

SKIPPED, FEWEST = 5, 3
"""Steps that count for nothing, and how many others make a number."""
DOCUMENTS = 1000
_MEMORY = re.compile(r"memory (\d+\.\d+)")
_NO_MEMORY = "OutOfMemoryError"

Ran: TypeAlias = tuple[list[dict[str, Any]], str]
Run: TypeAlias = Callable[[Mapping[str, object], Path, int, float], Ran]


def corpus(folder: Path, documents: int, vocab: int) -> None:
    """Shards of documents whose lengths are spread like those of the web: log-normal, median about 600 words."""
    drawn = random.Random(1)
    words = ["".join(drawn.choices("aeioubcdfglmnprst", k=drawn.randint(2, 9))) for _ in range(5000)]
    lengths = [max(20, round(drawn.lognormvariate(6.4, 1.1))) for _ in range(documents)]
    texts = [" ".join(drawn.choices(words, k=length)) for length in lengths]
    make_corpus(texts, train_tokenizer(texts[:200], vocab), folder, 10**6)


def overrides(settings: Mapping[str, object]) -> list[str]:
    """As the trainer's ``--set`` takes them."""
    return [f"{name}={value}" for name, value in settings.items()]


def train(settings: Mapping[str, object], folder: Path, steps: int, until: float) -> Ran:
    """The metrics of a run of the trainer alone, and all that it printed.

    It is ended with the line of its last step, since the checkpoint that would follow measures nothing, and at
    ``until`` (monotonic seconds).
    """
    folder.mkdir()
    log, metrics = folder / "log", folder / "run" / "metrics.jsonl"
    given = settings | {"run.folder": folder / "run", "run.steps": steps, "run.log_every": 1}
    sets = [f"--set={override}" for override in overrides(given)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPSD_", "RANK"))}
    command = [sys.executable, "-m", "opsd.trainer", PRESET, *sets]
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True) as process,
    ):
        try:
            while process.poll() is None and time.monotonic() < until and len(_lines(metrics)) < steps:
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return _lines(metrics), log.read_text(encoding="utf-8", errors="replace")


def _lines(metrics: Path) -> list[dict[str, Any]]:
    text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def summary(lines: Sequence[Mapping[str, Any]], skipped: int) -> dict[str, float | None]:
    """Tokens/s, MFU, share of a step spent waiting for data, and the longest stall of a checkpoint in seconds.

    Steps in which a checkpoint was staged count for the stall only; without one that is None.
    """
    steady = [line for line in lines[skipped:] if not line["checkpoint_s"]]
    mfu = [line["mfu"] for line in steady if line["mfu"] is not None]
    return {
        "tokens_per_s": statistics.median(line["tokens_per_s"] for line in steady),
        "mfu": statistics.median(mfu) if mfu else None,
        "data_share": sum(line["data_s"] for line in steady) / sum(line["step_s"] for line in steady),
        "checkpoint_stall_s": max(line["checkpoint_s"] for line in lines) or None,
    }


def machine() -> dict[str, str]:
    """What the numbers belong to."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "gpu": gpu, "torch": torch.__version__,
        "cuda": torch.version.cuda or "none", "python": platform.python_version(),
    }  # fmt: skip


def measure(
    parts: Mapping[str, Part],
    common: Mapping[str, object],
    skipped: int = SKIPPED,
    documents: int = DOCUMENTS,
    run: Run | None = None,
) -> Iterator[dict[str, Any]]:
    """Run the parts one after another with ``run``, by default ``train``; yields the results so far after each."""
    until = time.monotonic()
    results: dict[str, Any] = machine() | {"parts": {}}
    with tempfile.TemporaryDirectory() as shards:
        corpus(Path(shards), documents, 2000)
        for name, part in parts.items():
            until += part.seconds
            settings = {"checkpoint.every": part.steps, **common, **part.settings}
            results["parts"][name] = _measured(part, settings | {"data.shards": shards}, skipped, until, run or train)
            yield results


def _measured(part: Part, settings: Mapping[str, object], skipped: int, until: float, run: Run) -> dict[str, Any]:
    """The numbers of a part, or why there are none; with half the batch as often as memory does not suffice."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        lines, log = run(settings, Path(temporary) / "part", part.steps, until)
    batch = int(str(settings["data.batch"]))
    if len(lines) < part.steps and _NO_MEMORY in log and batch > 1 and time.monotonic() < until:
        halved = {"data.batch": batch // 2, "data.micro_batch": batch // 2}
        return _measured(part, settings | halved, skipped, until, run)
    lasting = {name: value for name, value in settings.items() if name != "data.shards"}
    result = {"what": part.what, "preset": PRESET, "settings": lasting, "steps": len(lines)}
    if len(lines) < part.steps:
        is_measured = len(lines) >= skipped + FEWEST
        reason = _reason(len(lines), log, out_of_time=time.monotonic() >= until)
        result["stopped" if is_measured else "skipped"] = reason
        if not is_measured:
            return result
    model = load(PRESET, overrides(settings)).model
    return result | summary(lines, skipped) | {
        "memory_gib": max(map(float, _MEMORY.findall(log)), default=None),
        "parameters": counts.parameters(model), "active_parameters": counts.active_parameters(model),
    }  # fmt: skip


def _reason(steps: int, log: str, *, out_of_time: bool) -> str:
    if _NO_MEMORY in log:
        return f"out of memory in step {steps + 1}"
    if out_of_time:
        return f"its time was up in step {steps + 1}"
    return f"failed in step {steps + 1}: {(log.strip().splitlines() or ['it printed nothing'])[-1][:300]}"


def main() -> None:
    """Measure on the GPU and write the results."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench-gpu: torch finds no GPU here; nothing was measured")
    arguments.results.mkdir(parents=True, exist_ok=True)
    for results in measure({name: PARTS[name] for name in arguments.parts}, ON_GPU):
        path = arguments.results / f"{results['date']}-{results['gpu'].replace(' ', '-')}.json"
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        name, part = list(results["parts"].items())[-1]
        print(f"{name}: {json.dumps({key: value for key, value in part.items() if key != 'settings'})}", flush=True)
    print(path)
    if not any("tokens_per_s" in part for part in results["parts"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
