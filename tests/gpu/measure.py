"""What the trainer reaches on the GPU of this machine: ``make bench-gpu`` writes it to ``tests/gpu/results``.

Each case is a run of the trainer itself, on documents of realistic lengths, and its numbers are those of its
``metrics.jsonl``: the median over the steps after the first ten, which compile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from opsd.trainer.data.tokenize import make_corpus, train_tokenizer

SKIPPED = 10
CASES: dict[str, dict[str, object]] = {
    "document_mask": {},
    "causal": {"model.document_mask": "false"},
    "z_loss": {"optimizer.z_loss": 1e-5},
}
ON_GPU: dict[str, object] = {
    "run.device": "cuda", "data.micro_batch": 2, "data.batch": 8, "parallel.compile": "true",
    "parallel.recompute": "selective",
}  # fmt: skip


def corpus(folder: Path, documents: int, vocab: int) -> None:
    """Shards of documents whose lengths are spread like those of the web: log-normal, median about 600 words."""
    drawn = random.Random(1)
    words = ["".join(drawn.choices("aeioubcdfglmnprst", k=drawn.randint(2, 9))) for _ in range(5000)]
    lengths = [max(20, round(drawn.lognormvariate(6.4, 1.1))) for _ in range(documents)]
    texts = [" ".join(drawn.choices(words, k=length)) for length in lengths]
    make_corpus(texts, train_tokenizer(texts[:200], vocab), folder, 10**6)


def train(preset: str, settings: Mapping[str, object], folder: Path) -> list[dict[str, Any]]:
    """Run the trainer alone; returns the lines of its metrics. Raises CalledProcessError if it fails."""
    sets = [f"--set={name}={value}" for name, value in (settings | {"run.folder": folder}).items()]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPSD_", "RANK"))}
    subprocess.run([sys.executable, "-m", "opsd.trainer", preset, *sets], check=True, env=environment)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def summary(lines: Sequence[Mapping[str, Any]], skipped: int) -> dict[str, float | None]:
    """Tokens/s, MFU, share of a step spent waiting for data, and the longest stall of a checkpoint in seconds.

    Steps in which a checkpoint was staged count for the stall only.
    """
    steady = [line for line in lines[skipped:] if not line["checkpoint_s"]]
    mfu = [line["mfu"] for line in steady if line["mfu"] is not None]
    return {
        "tokens_per_s": statistics.median(line["tokens_per_s"] for line in steady),
        "mfu": statistics.median(mfu) if mfu else None,
        "data_share": sum(line["data_s"] for line in steady) / sum(line["step_s"] for line in steady),
        "checkpoint_stall_s": max(line["checkpoint_s"] for line in lines),
    }


def machine() -> dict[str, str]:
    """What the numbers belong to."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "gpu": gpu, "torch": torch.__version__,
        "cuda": torch.version.cuda or "none", "python": platform.python_version(),
    }  # fmt: skip


def measure(
    preset: str, steps: int, skipped: int, settings: Mapping[str, object], documents: int = 1000
) -> dict[str, Any]:
    """Run all cases; flat results, with what the document mask and z-loss cost as ratios to the plain case."""
    results: dict[str, Any] = {"preset": preset, "steps": steps, "settings": dict(settings)} | machine()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        corpus(folder / "shards", documents, 2000)
        common = {"data.shards": folder / "shards", "run.steps": steps, "checkpoint.every": steps - 1, **settings}
        for case, changes in CASES.items():
            numbers = summary(train(preset, common | changes, folder / case), skipped)
            results |= {f"ours_{case}_{name}": value for name, value in numbers.items()}
    plain = results["ours_document_mask_tokens_per_s"]
    results["ratio_document_mask_to_causal"] = plain / results["ours_causal_tokens_per_s"]
    results["ratio_z_loss_to_none"] = results["ours_z_loss_tokens_per_s"] / plain
    return results


def main() -> None:
    """Measure on the GPU and write the results."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--preset", default="smollm3-3b")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench-gpu: torch finds no GPU here; nothing was measured")
    results = measure(arguments.preset, arguments.steps, SKIPPED, ON_GPU)
    arguments.results.mkdir(parents=True, exist_ok=True)
    name = f"{results['date']}-{results['gpu'].replace(' ', '-')}-{arguments.preset}.json"
    text = json.dumps(results, indent=1) + "\n"
    (arguments.results / name).write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
