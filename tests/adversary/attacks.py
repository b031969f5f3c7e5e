"""What several attacks are made of. Each function is self-contained: ``Attacker`` runs its source as another user."""

from __future__ import annotations


def invent_run(shm: str, name: str, *fields: dict[str, object]) -> None:
    """A run of 16 ranks whose launcher is this process and whose rank 0 works on GPU 0; lasts until it is killed.

    ``fields`` replace what ``run.json`` says.
    """
    import json
    import os
    import time
    from pathlib import Path

    from opsd.client import Reporter, process_start

    folder = Path(shm, name)
    folder.mkdir(mode=0o755)
    reporter = Reporter(folder / "rank-0000.page", rank=0, gpu=0, run=name, world_size=16)
    said = {
        "state": "running", "launcher_pid": os.getpid(), "launcher_start": process_start(os.getpid()), "job": "",
        "node": "node1", "generation": 0, "world_size": 16, "control": str(folder / "control.sock"),
        "folder": str(folder),
    }  # fmt: skip
    for changes in fields:
        said |= changes
    (folder / "run.json").write_text(json.dumps(said))
    while True:
        reporter.step(tokens=1, loss=2.0)
        print("lives", flush=True)
        time.sleep(0.5)


def false_exporter(host: str, port: int, page: str) -> None:
    """Listen where dcgm-exporter does, and answer every question with ``page``."""
    import socket
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page.encode())

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    server = Server((host, port), Handler)
    print("listens", flush=True)
    server.serve_forever()


def false_ras(port: int, answer: str) -> None:
    """Listen where NCCL's RAS does, give everybody ``answer``, and print what they ask."""
    import socket

    listener = socket.create_server(("127.0.0.1", port))
    print("listens", flush=True)
    while True:
        connection, _ = listener.accept()
        with connection:
            print(connection.recv(4096).decode(), flush=True)
            connection.sendall(answer.encode())


def crash_in_a_file(folder: str, name: str, process: str) -> None:
    """End with a segmentation fault in a file called ``name`` as ``process``: the kernel's log has both names."""
    import ctypes
    import os
    from pathlib import Path

    child = os.fork()
    if child == 0:
        Path("/proc/self/comm").write_text(process)
        Path(folder, name).write_bytes(b"\xc7\x04\x25" + bytes(5000))  # mov dword [0], 0
        file = os.open(Path(folder, name), os.O_RDONLY)
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        ctypes.CFUNCTYPE(None)(libc.mmap(None, 4096, 5, 2, file, 0))()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def hold_connections(port: int, request: str, number: int) -> None:
    """Keep ``number`` connections that have sent ``request`` and send a byte now and then; none is ever read."""
    import contextlib
    import socket
    import time

    held: list[socket.socket] = []
    told = False
    while True:
        while len(held) < number:
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.settimeout(5)
            with contextlib.suppress(OSError):
                connection.connect(("127.0.0.1", port))
                connection.sendall(request.encode())
            held.append(connection)
        if not told:
            told = True
            print("holds", flush=True)
        time.sleep(0.2)
        alive = []
        for connection in held:
            try:
                connection.sendall(b"x")
                alive.append(connection)
            except OSError:
                connection.close()
        held = alive


def make_runs(shm: str, count: int, living: bool) -> None:
    """Folders of runs; with ``living`` the launcher of each is this process."""
    import json
    import os
    import time
    from pathlib import Path

    from opsd.client import process_start

    for number in range(count):
        folder = Path(shm, f"job-{number:06d}")
        folder.mkdir(mode=0o755)
        said = {
            "state": "running" if living else "finished", "launcher_pid": os.getpid() if living else 1,
            "launcher_start": process_start(os.getpid()) if living else 1, "job": "", "node": "node1",
            "generation": 0, "world_size": 1, "control": "", "folder": str(folder),
        }  # fmt: skip
        (folder / "run.json").write_text(json.dumps(said))
        if not living:
            os.utime(folder / "run.json", (1, 1))
    print("made", flush=True)
    time.sleep(86_400)


def make_files(folder: str, count: int) -> None:
    """Empty files, in the folder of runs and in a run of its own."""
    import os
    import time
    from pathlib import Path

    own = Path(folder, "aa-mine")
    own.mkdir(mode=0o755)
    for number in range(count):
        os.mknod(f"{folder}/file-{number}")
        os.mknod(f"{own}/rank-{100_000 + number}.page")
    print("made", flush=True)
    time.sleep(86_400)


def make_ranks(shm: str, name: str, ranks: int) -> None:
    """A run with as many ranks, whose pages are full of steps."""
    import time
    from pathlib import Path

    from opsd.client import RING_STEPS, Reporter

    folder = Path(shm, name)
    folder.mkdir(mode=0o755)
    reporters = [Reporter(folder / f"rank-{rank:04d}.page", rank=rank, run=name) for rank in range(ranks)]
    for reporter in reporters:
        for step in range(RING_STEPS):
            reporter.step(tokens=123_456_789, loss=2.123456789 + step)
    print("made", flush=True)
    time.sleep(86_400)


def ask_without_reading(port: int, path: str, number: int) -> None:
    """Have ``number`` connections that ask for ``path`` and read the beginning of the answer; prints each status."""
    import contextlib
    import select
    import socket

    waiting: list[socket.socket] = []
    while True:
        while len(waiting) < number:
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            with contextlib.suppress(OSError):
                connection.connect(("127.0.0.1", port))
                connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            waiting.append(connection)
        for connection in select.select(waiting, [], [], 5)[0]:
            with contextlib.suppress(OSError):
                print(connection.recv(12).decode()[-3:] or "none", flush=True)
            waiting.remove(connection)
            connection.close()
