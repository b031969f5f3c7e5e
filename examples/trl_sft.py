"""Supervised fine-tuning with TRL on all ranks.

    opsd launch --standalone --nproc-per-node gpu examples/trl_sft.py MODEL DATA.jsonl

MODEL is a folder or a name on the hub; each line of the data is what TRL takes, ``{"prompt": ..., "completion": ...}``
or ``{"messages": [...]}``. TRL's trainers are Hugging Face's, so they take the same callback.
"""

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

from opsd.adapters.huggingface import RankPageCallback


def newest_checkpoint(folder: Path) -> str | None:
    """The newest that is complete: the Trainer writes its state last, and a node may die before."""
    complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(complete, key=lambda path: int(path.name.rpartition("-")[2]))) if complete else None


def main() -> None:
    """Tune."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    arguments = SFTConfig(
        output_dir=str(options.out), max_steps=options.steps, save_steps=options.save_every, logging_steps=10,
        max_length=1024, report_to="none", disable_tqdm=True, bf16=cuda, use_cpu=not cuda,
    )  # fmt: skip
    trainer = SFTTrainer(
        options.model,
        args=arguments,
        train_dataset=load_dataset("json", data_files=options.data, split="train"),
        callbacks=[RankPageCallback()],
    )
    trainer.train(resume_from_checkpoint=newest_checkpoint(options.out))


if __name__ == "__main__":
    main()
