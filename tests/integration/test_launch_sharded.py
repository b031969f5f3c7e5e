"""Checkpoints of which each rank writes a part: transformers' Trainer with FSDP and with DeepSpeed, on CPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from opsd.rank_page import read_page
from tests.fakes.launched import Launched
from tests.fakes.tree import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]

ON_CPUS = """
import accelerate.state  # which shards nothing on CPUs: it trains with DDP there
init = accelerate.state.AcceleratorState.__init__
def sharded(self, *args, fsdp_plugin=None, **kwargs):
    init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        self.fsdp_plugin, self.distributed_type = fsdp_plugin, accelerate.DistributedType.FSDP
        accelerate.state.PartialState._shared_state["distributed_type"] = self.distributed_type
accelerate.state.AcceleratorState.__init__ = sharded
"""
WITHOUT_COMPILER = """
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for minutes
"""
PROGRAM = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})  # for the tiny model only
import torch, transformers
from tests.fakes.posttrain import tiny_llama

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.arange(index, index + 8) % 32
        return {{"input_ids": ids, "labels": ids}}

class Slowly(transformers.TrainerCallback):
    def on_step_end(self, *_, **__):
        time.sleep(float(os.environ.get("SLOWLY", 0)))

(arguments,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_args_into_dataclasses()
trainer = transformers.Trainer(tiny_llama(), arguments, train_dataset=Numbers(), callbacks=[Slowly()])
trainer.train()
print(type(trainer.model_wrapped).__name__)
"""
FLAGS = (
    "--output_dir=model --per_device_train_batch_size=2 --save_steps=2 --logging_steps=1 --report_to=none "
    "--use_cpu=True --disable_tqdm=True"
)
ZERO = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto"}
KINDS = {
    "fsdp sharded": ("--fsdp", {"state_dict_type": "SHARDED_STATE_DICT"}, "pytorch_model_fsdp_0/__1_0.distcp"),
    "fsdp full": ("--fsdp", {"state_dict_type": "FULL_STATE_DICT"}, "optimizer.bin"),
    "zero 2": (
        "--deepspeed", ZERO | {"zero_optimization": {"stage": 2}},
        "global_step{step}/zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ),
    "zero 3": (
        "--deepspeed", ZERO | {"zero_optimization": {"stage": 3}},
        "global_step{step}/zero_pp_rank_1_mp_rank_00_model_states.pt",
    ),
}  # fmt: skip
"""The flag, its settings, and a file of a checkpoint."""
WRAPPED = {"--fsdp": "FSDPLlamaForCausalLM", "--deepspeed": "DeepSpeedEngine"}


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which DeepSpeed can be imported; without a package index these tests are skipped by name."""
    environment = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    if importlib.util.find_spec("deepspeed") is not None:
        return environment
    packages = tmp_path_factory.mktemp("packages")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
    wanted = ["deepspeed", "hjson", "py-cpuinfo", "ninja", "msgpack", "einops"]
    done = subprocess.run([*install, *wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"deepspeed cannot be installed: {done.stderr.splitlines()[-1]}")
    return environment | {"PYTHONPATH": str(packages)}


def parts(checkpoint: Path) -> dict[str, bytes]:
    """The files of a checkpoint that hold weights or the optimizer."""
    files = (path for path in checkpoint.rglob("*") if path.suffix in (".distcp", ".bin", ".pt", ".safetensors"))
    return {path.relative_to(checkpoint).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", KINDS)
def test_a_rank_dies_and_parts_are_lost(tmp_path: Path, name: str, request: pytest.FixtureRequest) -> None:
    """A killed rank changes no result. A checkpoint that lacks the part of one rank is passed over, and named."""
    flag, settings, part = KINDS[name]
    environment = request.getfixturevalue("deepspeed") if flag == "--deepspeed" else {"OMP_NUM_THREADS": "1"}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    path = str(tmp_path / "settings.json")
    words = (*FLAGS.split(), *(("--fsdp=full_shard", f"--fsdp_config={path}") if flag == "--fsdp" else (flag, path)))
    source = (ON_CPUS if flag == "--fsdp" else WITHOUT_COMPILER) + PROGRAM

    def launched(folder: Path, steps: int, **more: str) -> Launched:
        folder.mkdir(exist_ok=True)
        given = (*words, f"--max_steps={steps}")
        return Launched(folder, source, "--nproc-per-node", "2", args=given, env=environment | more)

    with launched(tmp_path / "quiet", 6) as run:
        assert run.wait(300) == 0, run.err
        assert WRAPPED[flag] in run.out
    folder = tmp_path / "disturbed"
    with launched(folder, 6, SLOWLY="0.5") as run:
        run.until(lambda: any(event["step"] >= 2 for event in run.events("checkpoint_committed")), 200)
        os.kill(read_page(run.memory / "rank-0001.page").pid, signal.SIGKILL)
        assert run.wait(300) == 0, run.err
        assert "the training goes on from" in run.out + run.err
    quiet, disturbed = (parts(each / "model/checkpoint-6") for each in (tmp_path / "quiet", folder))
    assert quiet.keys() == disturbed.keys()
    changed = {file for file in quiet if quiet[file] != disturbed[file]}
    assert changed <= {"optimizer.bin"}, "whose pickle has shared strings in another order"
    for file in changed:
        one, other = (torch.load(each / "model/checkpoint-6" / file) for each in (tmp_path / "quiet", folder))
        torch.testing.assert_close(one["state"], other["state"], rtol=0, atol=0)

    (folder / "model/checkpoint-6" / part.format(step=6)).unlink()
    with launched(folder, 8) as run:
        assert run.wait(300) == 0, run.err
        assert f"checkpoint-6 is not complete: {part.format(step=6)} is missing" in run.out + run.err
        assert re.search(r"the training goes on from \S+checkpoint-4", run.out + run.err)
    for step in (2, 4, 6, 8):
        file = folder / f"model/checkpoint-{step}" / part.format(step=step)
        if file.exists():
            os.truncate(file, file.stat().st_size - 1)
    with launched(folder, 10) as run:
        assert run.wait(300) == 1, run.err
        assert "no checkpoint to go on from is complete" in run.err
        assert f"checkpoint-8 is not complete: {part.format(step=8)} has" in run.out + run.err


CONFIGURATION = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
use_cpu: false
"""


def test_a_configuration_of_accelerate(tmp_path: Path) -> None:
    """The guide's command turns a file into variables that hold in the ranks; what a later start leaves out is told."""
    (tmp_path / "FILE").write_text(CONFIGURATION)
    command = re.search(
        r"^accelerate launch (?:.*\\\n)*.*$", (ROOT / "docs/post-training.md").read_text(), re.MULTILINE
    )
    assert command is not None
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-ec", command[0]], cwd=tmp_path, env=environment, check=True, timeout=120)
    given = dict(line.split("=", 1) for line in (tmp_path / "accelerate.env").read_text().splitlines())
    given |= {"OMP_NUM_THREADS": "1"}
    for steps, changed in ((2, {}), (4, {"ACCELERATE_MIXED_PRECISION": "no"})):
        words = (*FLAGS.split(), f"--max_steps={steps}")
        with Launched(tmp_path, ON_CPUS + PROGRAM, "--nproc-per-node", "2", args=words, env=given | changed) as run:
            assert run.wait(300) == 0, run.err
            assert WRAPPED["--fsdp"] in run.out
        assert (tmp_path / f"model/checkpoint-{steps}/pytorch_model_fsdp_0/__1_0.distcp").exists()
    assert 'mixed_precision was "bf16" at the checkpoint and is "no"' in run.out + run.err
