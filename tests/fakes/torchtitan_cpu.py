"""torchtitan with a rank page, on the CPU: ``python torchtitan_cpu.py FOLDER STEPS`` trains a small Llama there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from opsd.bench.torchtitan_cpu import ALONE, Shape, configure

SHAPE = Shape(layers=2, width=64, heads=4, kv_heads=2, ffn=128, vocab=256, length=64, rows=2, micro_batches=2)

if __name__ == "__main__":
    from opsd.adapters.torchtitan import RankPageTrainer  # after it has been told what a CPU is

    os.environ.update(ALONE)
    config = configure(SHAPE, Path(sys.argv[1]), int(sys.argv[2]))
    config.checkpoint.enable, config.checkpoint.interval = True, 3
    trainer = RankPageTrainer(config)
    trainer.train()
    trainer.close()
