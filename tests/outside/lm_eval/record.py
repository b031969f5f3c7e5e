"""Run by the Python of lm-evaluation-harness: writes what it makes of the items beside this file.

python tests/outside/lm_eval/record.py TARGET
"""

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

HERE = Path(__file__).parent
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: answer
target_delimiter: {delimiter}
metric_list: [{{metric: acc}}, {{metric: acc_norm}}, {{metric: acc_bytes}}]
"""


def main(target: Path) -> None:
    """The scores of each item, in order, by the harness's own tasks."""
    tasks = defaultdict(list)
    for line in (HERE / "items.jsonl").read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        tasks[item["task"]].append(item)
    with tempfile.TemporaryDirectory() as name, open(target, "w", encoding="utf-8") as output:
        for task, items in tasks.items():
            file = Path(name, f"{task}.jsonl")
            file.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
            delimiter = json.dumps(items[0]["delimiter"])
            text = TASK.format(name=task, file=file, delimiter=delimiter)
            Path(name, f"{task}.yaml").write_text(text, encoding="utf-8")
        model = HFLM(pretrained=str(HERE / "model"), dtype="float32", device="cpu", max_length=96, batch_size=1)
        manager = TaskManager(include_path=name, include_defaults=False)
        found = lm_eval.simple_evaluate(
            model, tasks=list(tasks), task_manager=manager, log_samples=True, bootstrap_iters=0
        )
        for task in tasks:
            for sample in sorted(found["samples"][task], key=lambda sample: sample["doc_id"]):
                scores = [float(response[0]) for response in sample["filtered_resps"]]
                line = {"task": task, "log_likelihoods": [round(score, 5) for score in scores]}
                line |= {name: sample[name] for name in ("acc", "acc_norm", "acc_bytes")}
                output.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
