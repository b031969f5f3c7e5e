"""What stands for more memory than it takes on the wire or on disk. Self-contained, see ``Attacker``."""

from __future__ import annotations


def full_runs(shm: str, name: str, runs: int, ranks: int) -> None:
    """Living runs, each with as many ranks whose pages are full of steps, and events whose values take most memory."""
    import json
    import os
    import time
    from pathlib import Path

    from opsd.client import RING_STEPS, Reporter, process_start

    first = Path(shm, f"{name}-{0:03d}".ljust(60, "x"))
    lines = "".join(
        json.dumps({"event": kind, "t": 1, "step": step, "x": [[]] * 30_000, "results": {f"{name}{step}": 1.0}}) + "\n"
        for step in range(16) for kind in ("evaluation", "data_mixture", "resumed")
    )  # fmt: skip
    reporters = []
    for number in range(runs):
        folder = Path(shm, f"{name}-{number:03d}".ljust(60, "x"))
        folder.mkdir(mode=0o755)
        for rank in range(ranks):
            page = f"rank-{rank:04d}.page"
            if number:
                os.link(first / page, folder / page)
                continue
            reporters.append(Reporter(folder / page, rank=rank, run=folder.name, job="j" * 60, world_size=ranks))
            for step in range(RING_STEPS):
                reporters[-1].step(tokens=123_456_789, loss=2.123456789 + step, grad_norm=1.123456789 + step)
        said = {
            "state": "running", "launcher_pid": os.getpid(), "launcher_start": process_start(os.getpid()),
            "job": "j" * 60, "node": "n" * 60, "generation": 0, "world_size": ranks, "control": "",
            "folder": str(folder), "logs": "/" + "l" * 4000,
        }  # fmt: skip
        (folder / "run.json").write_text(json.dumps(said))
        (folder / "events.jsonl").write_text("")
    print("made", flush=True)
    while True:
        for number in range(runs):
            path = Path(shm, f"{name}-{number:03d}".ljust(60, "x"), "events.jsonl")
            if path.stat().st_size > 4 << 20:
                path.unlink()
            with path.open("a") as stream:
                stream.write(lines)
            time.sleep(0.1)
        for reporter in reporters:
            reporter.step(tokens=1, loss=1.0)


def ras_bombs(shm: str, name: str, port: int) -> None:
    """A run that leads here, and its RAS, whose answers are as long as may be and take many times that as values."""
    import contextlib
    import json
    import os
    import socket
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
    head, size = "SERVER PROTOCOL 2\n", (20 << 20) - 500
    wide = "\U0001f600"  # the whole text takes four bytes a character then
    rank = '{"status": {"async_error": 1, "init_state": 0, "abort_flag": 0}, "rank": 1, "host": "%s", "pid": 1, '
    rank = rank % ("h" * 64) + '"nvml_dev": 1, "collective_counts": {}}'
    many = ",".join([rank] * 32)
    group = '{"hash": "%d", "size": 32, "missing_ranks": [], "ranks": [' + many + "]}"
    groups = ",".join(group % number for number in range(2_000))
    bodies = [
        '{"nccl_version": "2", "communicators": [' + groups + "]}",
        '{"communicators": [' + "[]," * (size // 3 - 20) + '[]], "nccl_version": "2"}',
        '{"nccl_version": "2", "communicators": [], "' + wide + "x" * (size - 80) + '": 1}',
        '{"' + wide + '": 1,' + ' "nvml_dev": 1 "status"' * (size // 24),
        "NCCL version 2.2\nWarnings\n" + "#0-0 (abc) MISMATCH\n" * 99_000 + wide + "x" * (size - 2_000_000),
    ]
    answers = [(head + body).encode() for body in bodies]
    listener = socket.create_server(("127.0.0.1", port))
    print("listens", flush=True)
    while True:
        for answer in answers:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(20)
                connection.recv(4096)
                connection.sendall(answer)
            reporter.step(tokens=1, loss=2.0)


def dump_bombs(shm: str, folder: str, name: str, every_s: float) -> None:
    """A run that leads here and leaves flight recorder dumps without end, which take many times as much as values."""
    import json
    import os
    import pickle
    import time
    from pathlib import Path

    from opsd.client import Reporter, process_start

    memory, place = Path(shm, name), Path(folder, name)
    memory.mkdir(mode=0o755)
    (place / "flight_recorder").mkdir(parents=True)
    reporter = Reporter(memory / "rank-0000.page", rank=0, run=name, world_size=4096)
    said = {
        "state": "running", "launcher_pid": os.getpid(), "launcher_start": process_start(os.getpid()), "job": "",
        "node": "node1", "generation": 0, "world_size": 4096, "control": "", "folder": str(place),
    }  # fmt: skip
    (memory / "run.json").write_text(json.dumps(said))

    def entry(number: int, group: str, shape: list[object]) -> dict[str, object]:
        return {
            "profiling_name": "nccl:all_reduce", "state": "started", "time_created_ns": number, "record_id": number,
            "collective_seq_id": number, "process_group": [group, "x"], "input_sizes": shape, "input_dtypes": shape,
            "output_sizes": shape,
        }  # fmt: skip

    def make(turn: int) -> bytes:
        long: list[object] = [["y" * 60] * 8] * 8
        first = 1000 + 100 * turn
        groups = {str(g): {"name": str(g), "ranks": str([*range(first, first + 8192)])} for g in range(31)}
        if turn % 5 == 0:  # one shape, which is there once in the file and in each call afterwards
            return pickle.dumps({"entries": [entry(n, str(n // 256), long) for n in range(16_384)]}, 4)
        if turn % 5 == 1:  # ranks, eight times as much as in the file
            return json.dumps({"entries": [], "pg_config": groups}, separators=(",", ":")).encode()
        if turn % 5 == 2:  # calls that never end
            return json.dumps({"entries": [entry(n, str(n), []) for n in range(10_000)]}).encode()
        if turn % 5 == 3:  # a large text that is there once in the file
            return pickle.dumps({"entries": [entry(1, "0", [["y" * 500_000] * 8] * 8)]}, 4)
        return ('{"entries":[' + "[]," * 1_300_000 + '"\U0001f600"]}').encode()

    print("begins", flush=True)
    turn = 0
    while True:
        (place / "flight_recorder" / f"rank_{turn % 64}").write_bytes(make(turn))
        reporter.step(tokens=1, loss=2.0)
        turn += 1
        time.sleep(every_s)


def long_ledgers(shm: str, folder: str, name: str, runs: int) -> None:
    """Living runs whose events and metrics are as long as may be, for a ledger of each."""
    import json
    import os
    import time
    from pathlib import Path

    from opsd.client import Reporter, process_start

    place = Path(folder, name)
    place.mkdir()
    step = json.dumps({"step": 1, "t": 1.0, "tokens": 1, "loss": 2.0, "phase_s": {"data": 1.0}}) + "\n"
    (place / "metrics.jsonl").write_text(step * ((16 << 20) // len(step)))
    event = json.dumps({"event": "generation_started", "t": 1.0, "generation": 1, "nodes": ["n"], "x": [[]] * 100})
    (place / "events.jsonl").write_text(f"{event}\n" * ((16 << 20) // len(event)))
    reporters = []
    for number in range(runs):
        memory = Path(shm, f"{name}-{number}")
        memory.mkdir(mode=0o755)
        reporters.append(Reporter(memory / "rank-0000.page", rank=0, run=memory.name, world_size=1))
        said = {
            "state": "running", "launcher_pid": os.getpid(), "launcher_start": process_start(os.getpid()), "job": "",
            "node": "node1", "generation": 0, "world_size": 1, "control": "", "folder": str(place),
        }  # fmt: skip
        (memory / "run.json").write_text(json.dumps(said))
    print("made", flush=True)
    while True:
        for reporter in reporters:
            reporter.step(tokens=1, loss=2.0)
        time.sleep(0.5)


def ask_for_all(port: int, paths: list[str], number: int) -> None:
    """Have ``number`` connections that ask for ``paths`` in turn and read nothing of the answer."""
    import contextlib
    import itertools
    import socket
    import time

    held: list[tuple[float, socket.socket]] = []
    print("begins", flush=True)
    for path in itertools.cycle(paths):
        while len(held) >= number:
            began, connection = held[0]
            time.sleep(max(0.0, began + 4.0 - time.monotonic()))
            held.pop(0)[1].close()
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(5)
        with contextlib.suppress(OSError):
            connection.connect(("127.0.0.1", port))
            accept = "Accept: application/openmetrics-text;version=0.0.1;escaping=dots\r\n"
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{accept}\r\n".encode())
        held.append((time.monotonic(), connection))
        time.sleep(0.02)
