"""PyTorch Lightning on all ranks: a recurrent network learns the bytes of a file.

    opsd launch --standalone --nproc-per-node 2 examples/lightning_fit.py README.md

Two things are for opsd: the callback, and a folder for checkpoints, without which ``ckpt_path="last"`` finds none.
"""

import argparse
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy

from opsd.adapters.lightning import RankPageCallback

LENGTH = 64


class Bytes(lightning.LightningModule):
    """Predicts the next byte."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding, self.memory, self.head = (
            nn.Embedding(256, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, 256),
        )  # fmt: skip

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """The loss of a batch, [rows, LENGTH + 1]."""
        hidden, _ = self.memory(self.embedding(batch[:, :-1]))
        return cross_entropy(self.head(hidden).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path, help="any file")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()

    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8).long()
    data = torch.utils.data.DataLoader(text.unfold(0, LENGTH + 1, LENGTH), batch_size=8, shuffle=True)
    trainer = lightning.Trainer(
        max_steps=options.steps,
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        callbacks=[
            RankPageCallback(tokens=lambda batch: batch[:, 1:].numel()),
            ModelCheckpoint(options.out, every_n_train_steps=options.save_every, save_last=True),
        ],
        log_every_n_steps=10, enable_progress_bar=False, logger=False,
    )  # fmt: skip
    trainer.fit(Bytes(), data, ckpt_path="last")


if __name__ == "__main__":
    main()
