"""A program that counts steps instead of training: ranks in step, a checkpoint now and then, no torch.

``python counting.py STEP_S EVERY``: each step takes ``STEP_S`` seconds, and ``EVERY`` steps after the start and after
each checkpoint comes the next. Ranks wait for each other in every step, fail when another is gone as a collective
does, and fail with an error of CUDA on a node that has the file ``DEAD_GPU``.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

from opsd.client import Reporter

DEAD_GPU = Path("/run/dead-gpu")
RANK_PID = Path("/dev/shm/rank.pid")
CONNECT_S = 20.0


class Ring:
    """All ranks, joined by the first one; a step ends when it has heard of each."""

    def __init__(self, rank: int, size: int) -> None:
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if rank:
            self._peers = [_connected(address)]
        else:
            with socket.create_server(("", address[1])) as server:
                server.settimeout(CONNECT_S)
                self._peers = [server.accept()[0] for _ in range(size - 1)]
        self._leads = not rank
        for peer in self._peers:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.settimeout(None)

    def any(self, own: bool) -> bool:
        """Whether it is true on any rank; all ranks come here."""
        if not self._leads:
            self._peers[0].sendall(bytes([own]))
            return _received(self._peers[0])
        found = any([own, *map(_received, self._peers)])
        for peer in self._peers:
            peer.sendall(bytes([found]))
        return found


def _connected(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection(address, CONNECT_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _received(peer: socket.socket) -> bool:
    try:
        said = peer.recv(1)
    except OSError as error:
        raise RuntimeError(f"gloo: {error}") from error
    if not said:
        raise RuntimeError("gloo: Connection closed by peer")
    return bool(said[0])


def main() -> None:
    """Count until somebody ends or stops it."""
    step_s, every = float(sys.argv[1]), int(sys.argv[2])
    reporter = Reporter.from_env()
    RANK_PID.write_text(str(os.getpid()))
    _check_gpu()
    rank, folder = int(os.environ["RANK"]), Path(os.environ["OPSD_RUN_DIR"])
    ring = Ring(rank, int(os.environ["WORLD_SIZE"]))
    saved = folder / "saved"
    start = step = int(saved.read_text()) if saved.exists() else 0
    began, stop = time.monotonic(), False
    with (folder / "metrics.jsonl").open("a", buffering=1) as metrics:
        while not stop:
            step += 1
            time.sleep(max(0.0, began + (step - start) * step_s - time.monotonic()))
            _check_gpu()
            stop = ring.any(reporter.stop_requested)
            reporter.step(step=step)
            if rank == 0:
                made = {"t": time.time(), "step": step, "generation": int(os.environ["OPSD_GENERATION"])}
                metrics.write(json.dumps(made) + "\n")
            if stop or (step - start) % every == 0:
                if rank == 0:
                    _save(saved, step)
                reporter.checkpoint_committed(step)
    reporter.close()


def _save(path: Path, step: int) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(str(step))
    draft.replace(path)


def _check_gpu() -> None:
    if DEAD_GPU.exists():
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


if __name__ == "__main__":
    main()
