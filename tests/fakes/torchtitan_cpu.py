"""torchtitan with a rank page, on the CPU: ``python torchtitan_cpu.py FOLDER STEPS [DEGREE]`` trains a small Llama.

``DEGREE`` is a field of torchtitan's ``parallelism`` that two ranks have.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from opsd.bench.torchtitan_cpu import ALONE, Shape, configure

SHAPE = Shape(layers=2, width=64, heads=4, kv_heads=2, ffn=128, vocab=256, length=64, rows=2, micro_batches=2)

if __name__ == "__main__":
    from opsd.adapters.torchtitan import RankPageTrainer  # after it has been told what a CPU is

    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    config = configure(SHAPE, Path(sys.argv[1]), int(sys.argv[2]))
    config.checkpoint.enable, config.checkpoint.interval = True, 3
    for name in sys.argv[3:]:
        setattr(config.parallelism, name, 2)
        if name == "pipeline_parallel_degree":
            config.model_spec.model.enable_weight_tying = False
    trainer = RankPageTrainer(config)
    trainer.train()
    trainer.close()
