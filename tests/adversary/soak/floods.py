"""Attacks that go on for as long as they are let. Self-contained, see ``Attacker``; each limits its own pace.

The pace is what keeps the limits of the agent biting all the time, and leaves the machine to others.
"""

from __future__ import annotations


def change_runs(shm: str) -> None:
    """Make and remove run folders of all kinds, thirty a second, some of which live and some of which are no runs."""
    import json
    import os
    import random
    import shutil
    import time
    from pathlib import Path

    from opsd.client import process_start

    draw, number = random.Random(1), 0
    print("begins", flush=True)
    while True:
        number += 1
        folder = Path(shm, f"change-{number:09d}")
        folder.mkdir(mode=draw.choice([0o755, 0o700, 0o000, 0o755]))
        folder.chmod(0o755) if number % 3 else None
        said = {
            "state": draw.choice(["running", "finished", "restarting", "odd", ""]),
            "launcher_pid": draw.choice([os.getpid(), 1, -1, 2**40, "1"]), "launcher_start": process_start(os.getpid()),
            "job": draw.choice(["", "4242", "x" * 9999]), "node": "node1", "generation": draw.choice([0, 1, 10**30]),
            "world_size": draw.choice([1, 16, 10**9]), "control": "", "folder": draw.choice([str(folder), "/", "\0"]),
        }  # fmt: skip
        text = draw.choice([json.dumps(said), json.dumps(said)[:40], "[" * 50_000, ""])
        if number % 3:
            (folder / "run.json").write_text(text)
            os.mkfifo(folder / "rank-0000.page")
            (folder / "rank-0001.page").symlink_to("/dev/zero")
        if number > 200:
            shutil.rmtree(Path(shm, f"change-{number - 200:09d}"), ignore_errors=True)
        time.sleep(0.03)


def flood_events(shm: str, name: str) -> None:
    """A living run whose launcher and ranks write a megabyte of events a second, and pages that are never the same."""
    import json
    import os
    import random
    import time
    from pathlib import Path

    from opsd.client import PAGE_BYTES, Reporter, process_start

    draw, step = random.Random(2), 0
    folder = Path(shm, name)
    folder.mkdir(mode=0o755)
    reporters = [Reporter(folder / f"rank-{rank:04d}.page", rank=rank, run=name, world_size=16) for rank in range(8)]
    said = {
        "state": "running", "launcher_pid": os.getpid(), "launcher_start": process_start(os.getpid()), "job": "",
        "node": "node1", "generation": 0, "world_size": 16, "control": "", "folder": str(folder),
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(said))
    kinds = ("evaluation", "data_mixture", "rank_exited", "hang_detected", "checkpoint_committed", "node_lost", "xid")
    print("begins", flush=True)
    while True:
        step += 1
        for reporter in reporters:
            reporter.step(tokens=1, loss=draw.choice([2.0, 1e308, float("nan")]))
        lines = []
        for number in range(1000):
            results = {f"r{draw.random()}": draw.random() for _ in range(20)} if number % 10 == 0 else {}
            record = {"event": draw.choice(kinds), "t": time.time(), "rank": number, "step": step, "results": results}
            lines.append(json.dumps(record) if number % 7 else "x" * 500)
        for file in ("events.jsonl", f"rank-{step % 8:04d}.page.events.jsonl"):
            path = folder / file
            if path.exists() and path.stat().st_size > 32 << 20:
                path.unlink()
            with path.open("a") as stream:
                stream.write("\n".join(lines) + "\n")
        (folder / f"rank-{8 + step % 8:04d}.page").write_bytes(draw.randbytes(PAGE_BYTES))
        time.sleep(0.5)


def burst_of_failures(shm: str, runs: int, every_s: float) -> None:
    """Again and again all runs of a user lose their loss at once, and are replaced by new ones."""
    import math
    import os
    import shutil
    import time
    from pathlib import Path

    from opsd.client import Reporter

    print("begins", flush=True)
    turn = 0
    while True:
        reporters, folders = [], []
        for number in range(runs):
            name = f"burst-{turn:05d}-{number:03d}"
            folders.append(Path(shm, name))
            folders[-1].mkdir(mode=0o755)
            reporters.append(Reporter(folders[-1] / "rank-0000.page", rank=0, run=name, world_size=1))
        until = time.monotonic() + every_s
        while (left := until - time.monotonic()) > 0:
            for reporter in reporters:
                reporter.step(tokens=1, loss=2.0 if left > every_s / 2 else math.nan, grad_norm=1.0)
            time.sleep(0.5)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        turn += 1
        del reporters
        os.sched_yield()


def slow_ras(shm: str, name: str, port: int) -> None:
    """A run that leads on this node, and its RAS service, which sends a byte a second without end."""
    import contextlib
    import json
    import os
    import select
    import socket
    import time
    from pathlib import Path

    from opsd.client import Reporter, process_start

    folder = Path(shm, name)
    folder.mkdir(mode=0o755)
    reporter = Reporter(folder / "rank-0000.page", rank=0, run=name, world_size=16)
    said = {
        "state": "running", "launcher_pid": os.getpid(), "launcher_start": process_start(os.getpid()), "job": "",
        "node": "node1", "generation": 0, "world_size": 16, "control": "", "folder": str(folder),
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(said))
    listener = socket.create_server(("127.0.0.1", port))
    print("listens", flush=True)
    newest = socket.socket()
    while True:
        reporter.step(tokens=1, loss=2.0)
        if select.select([listener], [], [], 1.0)[0]:
            newest = listener.accept()[0]  # the agent has given up the one before
        with contextlib.suppress(OSError):
            newest.sendall(b"S")
        time.sleep(0.2)


def slow_launcher(shm: str, name: str) -> None:
    """A run that calls for a restart all the time, and whose launcher answers a byte a second."""
    import contextlib
    import json
    import math
    import os
    import select
    import socket
    from pathlib import Path

    from opsd.client import Reporter, process_start

    folder = Path(shm, name)
    folder.mkdir(mode=0o755)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(folder / "control.sock"))
    server.listen(64)
    reporter = Reporter(folder / "rank-0000.page", rank=0, run=name, world_size=1)
    said = {
        "state": "running", "launcher_pid": os.getpid(), "launcher_start": process_start(os.getpid()), "job": "",
        "node": "node1", "generation": 0, "world_size": 1, "control": str(folder / "control.sock"),
        "folder": str(folder),
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(said))
    print("begins", flush=True)
    held: list[socket.socket] = []
    step = 0
    while True:
        step += 1
        reporter.step(tokens=1, loss=math.nan if step % 60 > 30 else 2.0, grad_norm=1.0)
        reporter.checkpoint_committed(0)
        if select.select([server], [], [], 1.0)[0]:
            held.append(server.accept()[0])
        for connection in held[-200:]:
            with contextlib.suppress(OSError):
                connection.send(b"{", socket.MSG_DONTWAIT)


def odd_requests(port: int) -> None:
    """Requests of all kinds, ten a second: valid ones that cost, odd ones, and no HTTP at all."""
    import contextlib
    import random
    import socket
    import time

    draw = random.Random(3)
    paths = ["/", "/metrics", "/api/v1/incidents", "/api/v1/ranks", "/job/4242", "/api/v1/status", "/%00", "/../etc"]
    print("begins", flush=True)
    while True:
        path = draw.choice(paths) + draw.choice(["", "?x=1", "?" + "y" * 5000, "?limit=-1"])
        headers = draw.choice(["", "Accept: text/plain;version=1..0\r\n", "Content-Length: 9\r\n", "Host: evil\r\n"])
        request = f"{draw.choice(['GET', 'HEAD', 'POST', 'X'])} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n"
        data = draw.choice([request.encode(), request.encode() * 20, draw.randbytes(2000), b"\x16\x03\x01\x02\0"])
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2) as connection:
            connection.settimeout(0.2)
            connection.sendall(data)
            connection.recv(1 << 16)
        time.sleep(0.1)


def crash_again_and_again(folder: str, name: str, every_s: float) -> None:
    """Segmentation faults in a file called ``name``: the kernel's log has it. Prints a line for each."""
    import ctypes
    import os
    import time
    from pathlib import Path

    Path(folder).mkdir()
    Path(folder, name).write_bytes(b"\xc7\x04\x25" + bytes(5000))  # mov dword [0], 0
    print("begins", flush=True)
    while True:
        child = os.fork()
        if child == 0:
            file = os.open(Path(folder, name), os.O_RDONLY)
            libc = ctypes.CDLL(None)
            libc.mmap.restype = ctypes.c_void_p
            ctypes.CFUNCTYPE(None)(libc.mmap(None, 4096, 5, 2, file, 0))()
        os.waitpid(child, 0)
        time.sleep(every_s)
