"""What the leader says on stderr: the opening, each restart in two lines, the command that goes on with a run."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opsd.launch.run.announcer import Announcer, agent_page, opening_block
from opsd.launch.run.closing import resume_command
from opsd.launch.run.notices import Notices


class Log:
    """Keeps the events."""

    def __init__(self) -> None:
        self.generation = 1
        self.events: list[str] = []

    def emit(self, event: str, age_s: float = 0.0, /, **fields: object) -> None:
        self.events.append(event)

    def relay(self, record: Mapping[str, Any], age_s: float) -> None:
        self.events.append(record["event"])


def announcer(said: list[str], *, opening: bool = True) -> tuple[Announcer, Log]:
    log = Log()
    notices = Notices("tiny", "", lambda text, fields: said.append(f"notice: {text}"), lambda: 0.0)
    opener = (lambda event: "opening") if opening else None
    return Announcer(log, opener, notices, lambda text, tone: said.append(text)), log


def test_opening_is_said_once_and_not_by_a_later_leader() -> None:
    """The first generation opens the run; others do not, and a launcher that takes over says nothing of it."""
    said: list[str] = []
    first, _ = announcer(said)
    for _ in range(2):
        first.emit("generation_started", nodes=["a", "b"], world_size=4)
    later, log = announcer(said, opening=False)
    later.emit("generation_started", nodes=["a", "b"], world_size=4)
    assert said == ["opening", "notice: tiny started: 4 ranks on a, b"] and log.events == ["generation_started"]


def test_a_restart_says_from_where_and_with_which_nodes_once() -> None:
    """Every node relays ``resumed``; the terminal has it once, with the checkpoint and the node that came."""
    said: list[str] = []
    told, log = announcer(said, opening=False)
    told.emit("generation_started", nodes=["a", "b"])
    told.generation = 2
    told.emit("generation_started", nodes=["a", "c"])
    told.relay({"event": "checkpoint_loaded", "generation": 2, "rank": 0, "step": 20, "tier": "memory"}, 0.0)
    resumed = {"event": "resumed", "generation": 2, "step": 21, "lost_steps": 3, "recovered_s": 2.04}
    told.relay(resumed, 0.0)
    told.relay(resumed, 0.0)
    told.relay({**resumed, "generation": 1}, 0.0)
    assert said == [
        "restarted: it goes on with step 21 from the checkpoint of step 20 after 2.0 s; 3 steps are done again; "
        "c took the place of b"
    ]
    assert log.events.count("resumed") == 3 and log.generation == 2


def test_opening_block_has_the_shape_and_the_places() -> None:
    """Run, ranks, nodes, spares, folder, logs, page and how to go on; what there is not has no line."""
    event = {"nodes": ["n1", "n2"], "spares": ["n3"], "world_size": 16}
    text = opening_block(
        "tiny", event, folder=Path("/r"), logs=Path("/r/logs"), page="http://n1:9477/job/tiny", resume=""
    )
    assert text.splitlines() == [
        "tiny: 16 ranks on n1, n2",
        "  spares    n3",
        "  folder    /r",
        "  logs      /r/logs",
        "  page      http://n1:9477/job/tiny",
    ]


def test_page_is_named_where_something_listens(tmp_path: Path) -> None:
    """The address is the configured one; a file that is no TOML, or nobody who listens, is no error."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        file = tmp_path / "opsd.toml"
        file.write_text(f'[agent]\nlisten = "0.0.0.0:{port}"\n')
        assert agent_page("r", "n1", {"OPSD_CONFIG": str(file)}) == f"http://n1:{port}/job/r"
        file.write_text(f'[agent]\nlisten = "127.0.0.1:{port}"\nweb_config = "/w"\n')
        assert agent_page("r", "n1", {"OPSD_CONFIG": str(file)}) == f"https://127.0.0.1:{port}/job/r"
    assert agent_page("r", "n1", {"OPSD_CONFIG": str(file)}) == ""
    file.write_text('agent = "no section"\n')
    assert agent_page("r", "n1", {"OPSD_CONFIG": str(file)}).partition(":")[0] in ("", "http")


def test_resume_command() -> None:
    """Each start on one node has a new name, so the command names the run; Slurm keeps the job's."""
    typed = ["launch", "--nproc-per-node", "2", "train it.py"]
    assert resume_command(typed, "r-1", named=False, several=False, environ={}) == (
        "opsd launch --run-id r-1 --nproc-per-node 2 'train it.py'"
    )
    secret = ["launch", "--notify", "https://h/s3cret", "--notify=mailto://u:p@h", "x.py"]
    urls = ["https://h/s3cret", "mailto://u:p@h"]
    told = resume_command(secret, "r", named=True, several=False, secrets=urls, environ={})
    assert told == "opsd launch --notify URL --notify=URL x.py"
    assert resume_command(["train", "tiny"], "r-1", named=True, several=False, environ={}) == "opsd train tiny"
    assert resume_command(typed, "r-1", named=False, several=True, environ={}) == "the same command on each node"
    job = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    assert resume_command(typed, "r-1", named=False, several=False, environ=job) == "scontrol requeue 5_2"
