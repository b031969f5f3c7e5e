"""Hugging Face's Trainer on all ranks: a small Llama learns the bytes of a file.

    opsd launch --standalone --nproc-per-node 2 examples/hf_trainer.py README.md

The callback is all that opsd needs: steps, tokens and losses are seen, a swap of a node saves first, and a rank that
was replaced elsewhere writes no checkpoint.
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from opsd.adapters.huggingface import RankPageCallback

LENGTH = 64


class Pieces(torch.utils.data.Dataset):
    """A file in pieces of ``LENGTH`` bytes."""

    def __init__(self, path: Path) -> None:
        self.pieces = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).split(LENGTH)[:-1]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.pieces[index].long()
        return {"input_ids": ids, "labels": ids}


def newest_checkpoint(folder: Path) -> str | None:
    """The newest that is complete: the Trainer writes its state last, and a node may die before."""
    complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(complete, key=lambda path: int(path.name.rpartition("-")[2]))) if complete else None


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path, help="any file")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(options.out), max_steps=options.steps, save_steps=options.save_every, logging_steps=10,
        learning_rate=1e-3, report_to="none", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Pieces(options.text), callbacks=[RankPageCallback()])
    trainer.train(resume_from_checkpoint=newest_checkpoint(options.out))


if __name__ == "__main__":
    main()
