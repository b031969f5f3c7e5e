"""Unchanged programs under `opsd launch`: what is seen of them, and that they find the same state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opsd.ledger.ledger import read_ledger
from opsd.rank_page import RankPage, read_page
from tests.fakes.launched import Launched

pytest.importorskip("torch")
import os
import signal
import sys
from contextlib import suppress
from importlib.util import find_spec

import pytest

from opsd import exitcodes
from opsd.control import ControlError
from tests.fakes.launched import TRAIN
from tests.fakes.nodes import Nodes

# Unchanged programs under ``opsd launch``: their page has what they do, and their numbers stay as they are.


PROGRAM = """
import hashlib, json, os, sys
import torch
import torch._dynamo.utils
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
results = {}

def page():
    from opsd.rank_page import PageError, read_page
    from pathlib import Path
    try:
        return read_page(Path(os.environ["OPSD_RANK_PAGE"]))
    except PageError:
        return None

def steps():
    return page().steps_reported if page() else 0

def scenario(train):
    torch.manual_seed(7)
    torch._dynamo.utils.counters.clear()
    model, before = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 4)), steps()
    losses = train(model) or []
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters() if p.device.type == "cpu" and
                       type(p) is torch.nn.Parameter)
    counters = torch._dynamo.utils.counters
    results[train.__name__] = {
        "hash": hashlib.sha256(weights).hexdigest(), "losses": [value.hex() for value in losses],
        "steps": steps() - before,
        "graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values()),
    }

def loop(model, optimizer, count=6, accumulate=1):
    losses = []
    for _ in range(count):
        for _ in range(accumulate):
            loss = model(torch.randn(4, 8)).pow(2).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

@scenario
def accumulation(model):
    return loop(model, torch.optim.AdamW(model.parameters()), accumulate=64)

@scenario
def scaler(model):
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    losses = []
    for step in range(6):
        loss = model(torch.randn(4, 8)).pow(2).mean() * (float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

@scenario
def two_optimizers(model):
    a, b = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[2].parameters())
    losses = []
    for _ in range(6):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        loss.backward()
        a.step(); b.step()
        a.zero_grad(); b.zero_grad()
        losses.append(loss.item())
    return losses

@scenario
def lbfgs(model):
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(4, 8)
    def closure():
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss
    return [float(optimizer.step(closure)) for _ in range(3)]

@scenario
def ddp(model):
    return loop(torch.nn.parallel.DistributedDataParallel(model), torch.optim.AdamW(model.parameters()))

@scenario
def fsdp(model):
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))["dp"])
    losses = loop(model, torch.optim.AdamW(model.parameters()))
    dcp.save({"model": model.state_dict()}, checkpoint_id="dcp")
    dcp.load({"model": model.state_dict()}, checkpoint_id="dcp")
    return losses

@scenario
def compiled(model):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def reduced(x):
        dist.all_reduce(x)
        return x * 2
    @torch.compile(backend="aot_eager")
    def whole(x):
        with torch.no_grad():
            model(x)
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss
    optimizer = torch.optim.AdamW(model.parameters())
    losses = loop(torch.compile(model, backend="aot_eager"), optimizer)
    return losses + [float(whole(torch.randn(4, 8))) for _ in range(4)] + reduced(torch.ones(2)).tolist()

@scenario
def evaluated_and_saved(model):
    loader = DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4, num_workers=2)
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    for _ in range(2):
        model.train()
        for (x,) in loader:
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses += [model(x).sum().item() for (x,) in loader]
        if page():
            results["evaluation"] = page().phase
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{os.environ['RANK']}.pt")
        with open("losses.json", "w") as file:
            json.dump(losses, file)
    return losses

@torch.jit.script
def scripted(x: torch.Tensor):
    with torch.no_grad():
        return x * 2

results["scripted"] = scripted(torch.ones(2)).tolist()
with open(f"results-{os.environ['RANK']}.json", "w") as file:
    json.dump(results, file)
"""

STEPS = {
    "accumulation": 6, "scaler": 6, "two_optimizers": 6, "lbfgs": 3, "ddp": 6, "fsdp": 6, "evaluated_and_saved": 8,
}  # fmt: skip

EXCHANGE = 2
"""Each scenario has a new optimizer, and an exchange may cost that many steps."""


def run(folder: Path, *flags: str) -> tuple[dict[str, Any], RankPage | None]:
    """The results of rank 1 of two, and its page."""
    folder.mkdir()
    with Launched(
        folder, PROGRAM, "--nproc-per-node=2", "--max-restarts=0", *flags, env={"OMP_NUM_THREADS": "1"}
    ) as launched:
        assert launched.wait(240) == 0, launched.err
        path = launched.memory / "rank-0001.page"
        page = read_page(path) if path.exists() else None
        return json.loads((folder / "results-1.json").read_text()), page


@pytest.mark.long
@pytest.mark.timeout(500)
def test_hooks_change_no_number_and_see_every_step(tmp_path: Path) -> None:
    """Losses and weights are the same to the bit, and torch.compile makes the same graphs."""
    without, no_page = run(tmp_path / "without", "--no-observe")
    with_hooks, page = run(tmp_path / "with")
    assert no_page is None
    assert page is not None
    assert (page.source, page.tokens) == ("observed", 0)
    assert page.committed_step == page.steps[-1].step
    assert page.place == (1, 0, 0, 0)
    assert with_hooks.pop("evaluation") == "evaluation"
    for name, expected in STEPS.items():
        assert expected - EXCHANGE <= with_hooks[name]["steps"] <= expected + 1, (name, with_hooks[name])
    for results in (without, with_hooks):
        for scenario in results.values():
            if isinstance(scenario, dict):
                del scenario["steps"]
    assert with_hooks == without


RESUMES = """
import os, signal, time
import torch

torch.manual_seed(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
if os.path.exists("last.pt"):
    last = torch.load("last.pt")
    model.load_state_dict(last["model"])
    first = last["iteration"] + 1
for iteration in range(first, 40):
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.03)
    if iteration % 10 == 9:
        torch.save({"model": model.state_dict(), "iteration": iteration}, "new.pt")
        os.replace("new.pt", "last.pt")
    if first == 0 and iteration == 25:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_program_that_was_killed_has_steps_and_a_ledger(tmp_path: Path) -> None:
    """It goes on from its own checkpoint: the steps that are done again are known, and so is the ETTR."""
    with Launched(tmp_path, RESUMES) as launched:
        assert launched.wait(120) == 0, launched.err
        page = read_page(launched.memory / "rank-0000.page")
        ledger = read_ledger(launched.run)
    assert (page.source, page.steps[0].step, page.steps[-1].step, page.committed_step) == ("observed", 21, 40, 40)
    assert {event["step"] for event in launched.events("checkpoint_committed")} >= {10, 20, 30, 40}
    (exited,) = launched.events("rank_exited")
    (resumed,) = launched.events("resumed")
    assert exited["step"] in (25, 26)
    assert (resumed["step"], resumed["lost_steps"]) == (21, exited["step"] - 20)
    assert (ledger.steps, ledger.generations, ledger.finished) == (46, 2, True)
    assert ledger.notes == ()
    seconds = ledger.buckets
    assert seconds["productive"] > 39 * 0.03
    assert seconds["recomputed"] > 5 * 0.03
    assert seconds["restart"] > 0
    assert 0 < ledger.ettr < 1
    assert sum(seconds.values()) == pytest.approx(ledger.wall_s)


# With and without a warm standby a program finds the same state: its own, and that of the libraries it imports.


TWO = "--nproc-per-node=2"

SEEN = """
import faulthandler, gc, locale, random, signal, threading, warnings

def seen():
    main = sys.modules["__main__"]
    varying = ("MASTER_PORT", "OPSD_GENERATION", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RESTART_COUNT")
    return {
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags), "cwd": os.getcwd(),
        "main": [main.__name__, main.__file__, str(main.__spec__), str(main.__package__), sorted(vars(main))],
        "env": {name: value for name, value in os.environ.items() if name not in varying},
        "told": [os.environ[name] for name in varying[1:2] + varying[3:]],
        "signals": {int(number): str(signal.getsignal(number)) for number in signal.valid_signals() if number < 32},
        "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "warnings": [str(entry) for entry in warnings.filters], "threads": threading.active_count(),
        "gc": [gc.isenabled(), gc.get_threshold()], "locale": locale.setlocale(locale.LC_ALL, None),
        "umask": os.umask(0o22), "files": sorted(os.readlink(f"/proc/self/fd/{n}").partition(":")[0] for n in (0,)),
        "descriptors": len(os.listdir("/proc/self/fd")), "nice": os.nice(0), "recursion": sys.getrecursionlimit(),
        "faulthandler": faulthandler.is_enabled(), "hooks": [str(sys.excepthook), len(sys.meta_path)],
        "affinity": sorted(os.sched_getaffinity(0)), "modules": sorted(set(sys.modules) - {"_opsd_worker"}),
    }
"""
"""What a program can see of the process it runs in; ``told`` is what differs between generations."""


def two_generations(folder: Path, source: str, *flags: str, env: dict[str, str] | None = None) -> list[list[Any]]:
    """What both ranks of a cold and of a warm generation print: JSON, one line each. The source ends in ``show(x)``."""
    shown = (
        "\nimport json, os, sys, time\n"
        "def show(state):\n"
        "    print('seen', json.dumps(state), flush=True)\n"
        "    time.sleep(1000 if os.environ['OPSD_GENERATION'] == '1' else 0)\n"
    )
    head, _, tail = source.partition("show(")
    with Launched(folder, head + shown + "show(" + tail, TWO, *flags, env=env) as launched:
        launched.until(lambda: all("seen" in launched.log(rank) for rank in range(2)), 120)
        launched.until(lambda: launched.ask(cmd="status")["standby"] == 2, 120)
        os.kill(launched.event("generation_started")["ranks"][0]["pid"], signal.SIGKILL)
        assert launched.wait(120) == exitcodes.OK
        assert [event["standby"] for event in launched.events("generation_started")] == [0, 2]
        return [[seen_in(launched.log(rank, generation)) for rank in range(2)] for generation in (1, 2)]


def seen_in(log: str) -> Any:
    """What else was printed, and what was shown."""
    lines = log.splitlines()
    (state,) = [line for line in lines if line.startswith("seen ")]
    return ["\n".join(sorted({*lines} - {state})), json.loads(state.removeprefix("seen "))]


def test_the_state_of_the_process(tmp_path: Path) -> None:
    """Nothing that Python or the kernel tells a program about itself differs."""
    source = "import os, sys\nimport decimal, xml.dom.minidom, http.client\n" + SEEN + "\nshow(seen())"
    cold, warm = two_generations(tmp_path, source)
    for rank in range(2):
        assert [state[1].pop("told") for state in (cold[rank], warm[rank])] == [["1", "0"], ["2", "1"]]
        extra = set(warm[rank][1].pop("modules")) ^ set(cold[rank][1].pop("modules"))
        assert {name for name in extra if not name.startswith("_sysconfigdata")} <= {"ast", "_ast"}
        assert warm[rank] == cold[rank]
    assert cold[0][1]["argv"] == [str(tmp_path / "prog.py")]
    assert cold[0][1]["orig_argv"] == [sys.executable, "-u", str(tmp_path / "prog.py")]


def test_a_module_that_reads_the_environment_when_imported(tmp_path: Path) -> None:
    """It finds all that a rank is told, also what it writes to its log and to the environment itself."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/reader.py").write_text(
        "import os, random, sys, warnings\n"
        "NAMES = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'GROUP_RANK', 'ROLE_RANK', 'ROLE_NAME',\n"
        "         'TORCHELASTIC_RUN_ID', 'OPSD_RUN')\n"
        "STATE = {name: os.environ[name] for name in NAMES} | {'argv': sys.argv, 'path': sys.path[0]}\n"
        "STATE['main'] = sys.modules['__main__'].__file__\n"
        "os.environ['FROM_READER'] = 'rank ' + os.environ['RANK']\n"
        "print('imported for', os.environ['RANK'], flush=True)\n"
        "warnings.warn('mind this', stacklevel=2)\n"
        "warnings.simplefilter('ignore')\n"
    )
    source = "import os\nimport reader\nshow(reader.STATE | {'wrote': os.environ['FROM_READER']})"
    cold, warm = two_generations(tmp_path, source, env={"PYTHONPATH": str(tmp_path / "site-packages")})
    assert warm == cold
    assert [state["RANK"] for _, state in warm] == ["0", "1"]
    assert f"{tmp_path}/prog.py:2: UserWarning: mind this" in warm[0][0]


@pytest.mark.parametrize(
    "read",
    ["PORT = os.environ['MASTER_PORT']", "ALL = dict(os.environ)", "PORT = os.getenv('MASTER_PORT')"],
)
def test_a_module_that_reads_what_will_differ(tmp_path: Path, read: str) -> None:
    """Where it has read the port of one generation, the next one starts cold, and it finds the new port."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/reader.py").write_text(f"import os\n{read}\nPORT = os.environ['MASTER_PORT']\n")
    source = """
        import reader
        import os, sys, time
        print(reader.PORT == os.environ["MASTER_PORT"], flush=True)
        time.sleep(1000 if os.environ["OPSD_GENERATION"] == "1" else 0)
    """
    with Launched(tmp_path, source, env={"PYTHONPATH": str(tmp_path / "site-packages")}) as launched:
        launched.until(lambda: launched.ask(cmd="status")["standby"] == 1 if launched.log() else False)
        os.kill(launched.event("generation_started")["ranks"][0]["pid"], signal.SIGKILL)
        assert launched.wait() == exitcodes.OK
        assert (launched.log(0, 1), launched.log(0, 2)) == ("True\n", "True\n")
        assert [event["standby"] for event in launched.events("generation_started")] == [0, 0]


def test_a_module_that_makes_its_page_when_imported(tmp_path: Path) -> None:
    """The page of the living rank is not touched by the standby, which the next start does without."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/paged.py").write_text(
        "from opsd.client import Reporter\nREPORTER = Reporter.from_env()\n"
    )
    source = "import paged, time\nfor _ in range(100_000):\n    paged.REPORTER.step()\n    time.sleep(0.02)\n"
    env = {"PYTHONPATH": str(tmp_path / "site-packages")}
    with Launched(tmp_path, source, env=env) as launched:
        launched.until(lambda: launched.event("generation_started") and launched.ask(cmd="status")["standby"] == 1)
        pid = launched.event("generation_started")["ranks"][0]["pid"]
        assert read_page(launched.memory / "rank-0000.page").pid == pid
        os.kill(pid, signal.SIGKILL)
        assert launched.event("resumed")["generation"] == 2
        assert [event["standby"] for event in launched.events("generation_started")] == [0, 0]


def test_a_program_that_was_edited(tmp_path: Path) -> None:
    """A program that is corrected while it runs starts corrected, with what it sets before its imports."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/reader.py").write_text("import os\nMODE = os.environ.get('MODE', 'none')\n")
    source = "import os, time\nimport reader\nprint(reader.MODE, flush=True)\ntime.sleep(1000)\n"
    with Launched(tmp_path, source, env={"PYTHONPATH": str(tmp_path / "site-packages")}) as launched:
        launched.until(lambda: launched.ask(cmd="status")["standby"] == 1 if launched.log() else False)
        mended = "import os\nos.environ['MODE'] = 'mended'\nimport reader\nprint(reader.MODE, flush=True)\n"
        (tmp_path / "prog.py").write_text(mended)
        os.kill(launched.event("generation_started")["ranks"][0]["pid"], signal.SIGKILL)
        assert launched.wait() == exitcodes.OK
        assert launched.log(0, 2) == "mended\n"


def test_what_is_set_before_an_import_counts(tmp_path: Path) -> None:
    """A program that sets a variable and then imports who reads it is obeyed in every generation."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/reader.py").write_text("import os\nMODE = os.environ.get('MODE', 'none')\n")
    source = "import os\nos.environ['MODE'] = 'mine'\nimport reader\nshow(reader.MODE)"
    cold, warm = two_generations(tmp_path, source, env={"PYTHONPATH": str(tmp_path / "site-packages")})
    assert cold == warm == [["", "mine"], ["", "mine"]]


LIBRARIES = """
import os
import lightning
from lightning.pytorch.utilities import rank_zero_only
RANKS = [rank_zero_only.rank, lightning.fabric.utilities.rank_zero.rank_zero_only.rank]

import torch
import transformers
from accelerate import PartialState
from transformers import Trainer, TrainingArguments
STATE = PartialState(cpu=True)
STATE.wait_for_everyone()
ARGUMENTS = TrainingArguments("out", use_cpu=True, report_to="none")
show({
    "lightning": RANKS,
    "accelerate": [STATE.process_index, STATE.local_process_index, STATE.num_processes, STATE.is_main_process,
                   str(STATE.device), str(STATE.distributed_type)],
    "transformers": [ARGUMENTS.process_index, ARGUMENTS.world_size, ARGUMENTS.should_log, ARGUMENTS.should_save,
                     str(ARGUMENTS.parallel_mode), transformers.logging.get_verbosity(), torch.get_num_threads(),
                     torch.is_grad_enabled(), str(torch.get_default_dtype())],
})
"""


@pytest.mark.slow
def test_libraries(tmp_path: Path) -> None:
    """A library knows its rank in a warm start as in a cold one, and says the same."""
    if missing := [name for name in ("lightning", "accelerate", "transformers") if find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    cold, warm = two_generations(tmp_path, LIBRARIES)
    assert [state for _, state in warm] == [state for _, state in cold]
    for rank, (_, state) in enumerate(warm):
        assert state["lightning"] == [rank, rank]
        assert state["accelerate"] == [rank, rank, 2, rank == 0, "cpu:0", "DistributedType.MULTI_CPU"]
        assert state["transformers"][:2] == [rank, 2]


READER = "import os\nSEEN = [os.environ.get('RANK'), os.environ.get('WORLD_SIZE')]\n"

TELLS = (
    "import reader\n"
    + TRAIN
    + "print('seen', reader.SEEN == [os.environ['RANK'], os.environ['WORLD_SIZE']], *reader.SEEN, flush=True)\n"
    + "train(100_000, step_s=0.02)\n"
)


def reader_in(folder: Path) -> dict[str, str]:
    """A module that reads its place when imported, and the environment in which it is found."""
    (folder / "site-packages").mkdir()
    (folder / "site-packages/reader.py").write_text(READER)
    return {"PYTHONPATH": str(folder / "site-packages")}


def first_lines(logs: Path) -> list[str]:
    """How the logs of rank 0 begin that are not empty, the latest generation last."""
    texts = [path.read_text() for path in sorted(logs.glob("**/rank-0000.log"))]
    return [text.splitlines()[0] for text in texts if text]


def standby(nodes: Nodes, name: str) -> int:
    """The warm interpreters of a node; none while its launcher does not answer yet."""
    with suppress(ControlError):
        return int(nodes.ask(name, cmd="status")["standby"])
    return 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "count", "expected"),
    [(("--nnodes=1:2",), 2, "seen True 0 1"), (("--nnodes=2", "--spares=1"), 3, "seen True 0 2")],
)
def test_a_place_that_changes(tmp_path: Path, flags: tuple[str, ...], count: int, expected: str) -> None:
    """A rank that moves up when a node is lost, and one on a spare, find their new place, standby or not."""
    env = reader_in(tmp_path)
    with Nodes(
        tmp_path, TELLS, *flags, count=count, environ={f"n{number + 1}": env for number in range(count)}
    ) as nodes:
        nodes.until(lambda: len(nodes.events("generation_started")) == 1)
        first = nodes.events("generation_started")[0]["nodes"][0]
        others = [name for name in nodes.names if name != first]
        nodes.until(lambda: all(standby(nodes, name) == 1 for name in others))
        nodes.kill(first)
        nodes.until(lambda: len(nodes.events("resumed")) == 1)
        nodes.until(lambda: first_lines(tmp_path / "run/logs")[-1:] == [expected])
