"""Unchanged programs under ``opsd launch``: their page has what they do, and their numbers stay as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opsd.ledger.ledger import read_ledger
from opsd.rank_page import RankPage, read_page
from tests.fakes.launched import Launched

pytest.importorskip("torch")

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
