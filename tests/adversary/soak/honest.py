"""A user who trains on the node and does nothing wrong. Self-contained, see ``Attacker``."""

from __future__ import annotations


def train(shm: str, folder: str, name: str, first_gpu: int, ranks: int) -> None:
    """A run of ``ranks`` ranks, four steps a second, whose rank 0 prints a warning of NCCL every two seconds.

    Each evaluation says when it was written, in its step. Prints its process id, and lives until it is killed.
    """
    import json
    import os
    import time
    from pathlib import Path

    from opsd.client import Reporter, process_start

    memory, place = Path(shm, name), Path(folder, name)
    memory.mkdir(mode=0o755)
    logs = place / "logs" / "gen-0000"
    logs.mkdir(parents=True)
    reporters = [
        Reporter(memory / f"rank-{rank:04d}.page", rank=rank, gpu=first_gpu + rank, run=name, world_size=ranks)
        for rank in range(ranks)
    ]
    said = {
        "state": "running", "launcher_pid": os.getpid(), "launcher_start": process_start(os.getpid()), "job": "",
        "node": "node1", "generation": 0, "world_size": ranks, "control": "", "folder": str(place),
        "logs": str(place / "logs"),
    }  # fmt: skip
    (memory / "run.json").write_text(json.dumps(said))
    print(os.getpid(), flush=True)
    step, began = 0, time.monotonic()
    while True:
        step += 1
        for reporter in reporters:
            for phase in ("data", "forward", "backward", "collective", "optimizer"):
                with reporter.phase(phase):
                    pass
            reporter.step(tokens=4096, loss=2.0, grad_norm=1.0)
        if step % 8 == 0 and step > 40:
            with (logs / "rank-0000.log").open("a") as log:
                log.write(f"node1:1:1 [0] NCCL WARN planted {step}\n")
        if step % 20 == 0:
            event = {"t": time.time(), "event": "evaluation", "step": time.monotonic(), "results": {"loss": 2.0}}
            with (memory / "events.jsonl").open("a") as events:
                events.write(json.dumps(event) + "\n")
        time.sleep(max(0.0, began + 0.25 * step - time.monotonic()))
