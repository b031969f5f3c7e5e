"""A language model of bytes on all ranks, as it is written for torchrun. Nothing in it knows of opsd.

    torchrun    --standalone --nproc-per-node 2 examples/ddp.py README.md
    opsd launch --standalone --nproc-per-node 2 examples/ddp.py README.md

It continues from the checkpoint in the folder ``--out``, with the batches that come next.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

LENGTH = 64


class Model(nn.Module):
    """A small decoder-only transformer over bytes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits, [batch, position, byte], of ``ids``, [batch, position]."""
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        hidden = self.embedding(ids) + self.position.weight[: ids.shape[1]]
        return self.head(self.layers(hidden, mask=mask, is_causal=True))


def batch_of(text: torch.Tensor, step: int, rows: int = 8) -> torch.Tensor:
    """Random pieces of ``text``, [rows, LENGTH + 1]: always the same ones for a step and a rank."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(text) - LENGTH, (rows, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)].long()


def save(path: Path, state: dict[str, object]) -> None:
    """Replace the checkpoint at ``path``: whoever reads it finds the old one or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path, help="any file")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")

    torch.manual_seed(0)
    model = DistributedDataParallel(Model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8)
    first, checkpoint = 1, options.out / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1

    for step in range(first, options.steps + 1):
        batch = batch_of(text, step).to(device)
        loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.2f}", flush=True)
        if step % options.save_every == 0 or step == options.steps:
            if dist.get_rank() == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                save(checkpoint, state)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
