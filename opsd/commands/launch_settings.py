"""What the options of ``opsd launch`` come to: the program, the run, its shape and plan, and the limits of hangs."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import click
from click.core import ParameterSource

from opsd.commands.launch_options import rdzv_seconds, rendezvous_options
from opsd.evaluations.queue import PLACE
from opsd.launch.hangs.limits import HangLimits
from opsd.launch.io.console import STDOUT
from opsd.launch.io.reporting import print_message, takes_color
from opsd.launch.ranks.settings import PREFIX, Program, Settings, Streams
from opsd.launch.run.announcer import resume_command
from opsd.launch.run.companions import Beside
from opsd.launch.run.launchers import Launchers, NodeCount, RendezvousOptions
from opsd.launch.run.nodes import RunShape
from opsd.launch.run.readiness import known_at_start
from opsd.ledger.ledger import PLAN
from opsd.plan.hardware import kind_of
from opsd.rundir import valid_name
from opsd.slurm import topology_source
from opsd.slurm.allocation import segment_of
from opsd.slurm.requeue_helper import OPSD
from opsd.slurm.topology import Topology, TopologyError


def program_kind(options: dict[str, Any]) -> Literal["script", "module", "executable"]:
    """How the program is run; torchrun's ``--run-path`` is what happens to any script here, and comes first there."""
    if options["run_path"]:
        return "script"
    if options["module"] and options["no_python"]:
        raise click.UsageError("--module and --no-python exclude each other; leave one out.")
    return "module" if options["module"] else "executable" if options["no_python"] else "script"


LAUNCHERS = ("accelerate", "accelerate-launch", "deepspeed", "torchrun", "trl")
LAUNCHER_MODULES = (
    "accelerate.commands.",
    "deepspeed.launcher.",
    "torch.distributed.launch.",
    "torch.distributed.run.",
    "trl.cli.",
)
"""Programs that start ranks themselves, and what the names of such modules begin with."""


def refuse_launchers(program: Program, options: dict[str, Any]) -> None:
    """Raises click.UsageError for a program of which each rank would start all ranks of a job again."""
    named = Path(program.name).name in LAUNCHERS
    if program.kind == "module":
        named = f"{program.name}.".startswith(LAUNCHER_MODULES)
    if named and options["local_size"] > 1:
        raise click.UsageError(
            f"{program.given} starts ranks itself, and each of {options['local_size']} would train the whole model: "
            "name the training script in its place (TRL's are -m trl.scripts.sft and the like)"
        )


def settle_rendezvous(options: dict[str, Any]) -> None:
    """Replace torchrun's rendezvous flags in ``options`` by what they come to. Raises click.UsageError."""
    count: NodeCount = options["count"]
    if options["standalone"]:
        if is_several(options):
            raise click.UsageError("--standalone is for one node, and --nnodes or --spares ask for more; leave one out")
        options["rdzv_id"] = None
    for option, keys, least in (
        ("join_timeout", ("join_timeout", "timeout"), 1.0),
        ("last_call", ("last_call_timeout",), 0.0),
    ):
        options[option] = rdzv_seconds(options[option], _is_given(option), options["rdzv_conf"], *keys, least=least)
    options["rendezvous"] = rendezvous_options(
        count,
        options["spares"],
        backend=options["rdzv_backend"],
        endpoint=options["rdzv_endpoint"],
        master=(options["master_addr"], options["master_port"]),
        node_rank=options["node_rank"],
        local_address=options["local_addr"],
    )


def is_several(options: dict[str, Any]) -> bool:
    """Whether the run may have more than one launcher."""
    return bool(options["count"].most + options["spares"] > 1)


def default_name(program: Program, options: dict[str, Any]) -> str:
    """The name of a run that ``--run-id`` gives none; launchers of one run make the same."""
    found: RendezvousOptions | None = options["rendezvous"]
    if is_several(options):
        common = f"{found.host}-{found.port}" if found is not None else options["nodes"]
        return name_of_nodes(os.environ, options["rdzv_id"], common)
    return name_of_one_node(os.environ, options["rdzv_id"], program.cwd, (program.kind, program.name, *program.args))


def settings_of(program: Program, run: str, node: str, options: dict[str, Any]) -> Settings:
    """Those of the launcher of ``run`` on ``node``."""
    return Settings(
        program=replace(program, observe=not options["no_observe"]),
        run=run,
        job=os.environ.get("SLURM_JOB_ID", ""),
        node=node,
        local_size=options["local_size"],
        run_id=options["rdzv_id"] or run,
        role=options["role"],
        max_restarts=options["max_restarts"],
        restarts_asked=_is_given("max_restarts"),
        max_same_failures=options["max_same_failures"],
        refill_steps=options["restart_window"],
        standby=not options["no_standby"] and program.kind != "executable",
        standby_imports=options["standby_import"],
        stop_timeout_s=options["stop_timeout"],
        streams=Streams(
            options["redirects"],
            options["tee"],
            options["chosen"],
            os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or PREFIX,
        ),
        virtual_local_rank=options["virtual_local_rank"],
        resume=resume_command(
            sys.argv[1:],
            run,
            named=bool(options["run"] or options["run_dir"]),
            several=is_several(options),
            secrets=[where for where in options["notify"] if "://" in where],
        ),
        audit=options["audit"],
        evaluation=evaluation_of(program, options),
        gives_way=options["give_way"],
        color=takes_color(STDOUT),
    )


def evaluation_of(program: Program, options: dict[str, Any]) -> str:
    """The evaluation of checkpoints for the ranks' environment, "" for none. Raises click.UsageError."""
    command, queue = options["evaluation"], options["evaluation_queue"]
    if not command:
        return ""
    if program.name == TRAINER:
        raise click.UsageError("--evaluation is for trainers of Hugging Face; set evaluation.harness of the run")
    if not program.observe or options["no_observe"]:
        raise click.UsageError("--evaluation needs the callback that --no-observe leaves out; drop one of them")
    for flag, given in (("--evaluation", command), ("--evaluation-queue", queue)):
        try:
            words = shlex.split(given)
        except ValueError as error:
            raise click.UsageError(f"{flag} {given!r:.80} cannot be split into words: {error}") from error
        here = flag == "--evaluation-queue" or queue == PLACE
        if not words or (here and PLACE not in words[0] and shutil.which(words[0]) is None):
            raise click.UsageError(f"{flag} {given!r:.80} names no program that can be executed here")
    if PLACE not in queue:
        raise click.UsageError(f"--evaluation-queue {queue!r:.80} lacks {PLACE}, the place of the evaluation's command")
    return json.dumps({"command": command, "queue": queue, "python": sys.executable})


def besides_of(options: dict[str, Any]) -> list[Beside]:
    """The companions of the command line. Raises click.UsageError."""
    commands: Sequence[str] = options["beside"]
    found = []
    for name in ("beside_health", "beside_gpus"):
        if len(options[name]) > len(commands):
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"there are more {flag} than --beside; give one for each companion, in their order")
    for number, command in enumerate(commands):
        try:
            words = tuple(shlex.split(command))
        except ValueError as error:
            raise click.UsageError(f"--beside {command!r:.80} cannot be split into words: {error}") from error
        if not words or shutil.which(words[0]) is None:
            raise click.UsageError(f"--beside {command!r:.80} names no program that can be executed here")
        health, gpus = (options[name][number : number + 1] for name in ("beside_health", "beside_gpus"))
        if health and (urlsplit(health[0]).scheme not in ("http", "https") or not urlsplit(health[0]).hostname):
            raise click.UsageError(f"--beside-health {health[0]!r:.80} is no http or https URL")
        found.append(
            Beside(words, health[0] if health else "", gpus[0] if gpus else None, public=options["beside_public"])
        )
    return found


def shape_of(settings: Settings, options: dict[str, Any], launchers: Launchers) -> RunShape:
    """How many nodes the run has, and where. Raises click.UsageError if too few were named."""
    count: NodeCount = options["count"]
    have, need = len(launchers.members), count.least + options["spares"]
    if have < need:
        raise click.UsageError(f"the run has {have} nodes, and --nnodes and --spares ask for {need}")
    first = launchers.own == launchers.members[0]
    topology, lemons = _topology(first) if have > 1 else Topology(), frozenset[str]()
    if have > count.most and first:
        lemons, topology = known_at_start(topology)
    return RunShape(
        count.least,
        count.most,
        tuple(member.name for member in launchers.members),
        join_s=options["join_timeout"],
        last_call_s=0.0 if launchers.start else min(options["last_call"], options["join_timeout"] / 2),
        wait_s=options["wait_for_node"],
        grow_s=options["grow_after"],
        victim_s=options["node_timeout"] + 1.0,
        topology=topology,
        segment=_segment(settings, options) if have > 1 else 1,
        lemons=lemons,
    )


def hang_limits_of(options: dict[str, Any]) -> HangLimits | None:
    """The limits, None if hangs are not to be judged."""
    if not options["hang_limit"]:
        return None
    return HangLimits(
        options["hang_limit"],
        options["data_hang_limit"],
        options["startup_limit"],
        unannounced_s=max(options["hang_limit"], options["unannounced_hang_limit"]),
        idle_s=options["idle_limit"] or math.inf,
    )


def _segment(settings: Settings, options: dict[str, Any]) -> int:
    asked = options["segment"] or segment_of(os.environ)
    return asked or segment_of_trainer(settings.program, settings.local_size)


def _topology(first: bool) -> Topology:
    """The cluster's; what is odd about it tells the first launcher for all."""
    try:
        return topology_source.read(say=print_message if first else lambda _: None)
    except TopologyError as error:
        print_message(f"{error}; the run goes on without it")
        return Topology()


def _is_given(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def segment_of_trainer(program: Program, local_size: int) -> int:
    """The nodes of ``local_size`` ranks that ``parallel.tp`` x ``parallel.ep`` consecutive ranks fill.

    1 for a group that fits a node, or does not fill whole ones, for other programs, and for settings that the trainer
    will refuse.
    """
    if (program.kind, program.name) != ("module", TRAINER):
        return 1
    from opsd.trainer.config import ConfigError, load  # 40 ms, which other programs need not spend

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("config", nargs="?", default="")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    try:
        given, _ = parser.parse_known_args(program.args)
        parallel = load(given.config, given.overrides).parallel
    except (argparse.ArgumentError, ConfigError):
        return 1
    nodes, rest = divmod(parallel.tp * parallel.ep, local_size)
    return max(1, nodes) if rest == 0 else 1


_SPECIAL_STEPS = 4_294_967_290
"""Numbers from here on are Slurm's for the batch script and the like (slurm.h)."""

# The nodes of a run, and its starts after a requeue, must derive the same name. Unrelated runs must not, as a run
# continues from what an earlier start under its name has left.


def name_of_nodes(env: Mapping[str, str], rdzv_id: str | None, common: str) -> str:
    """The name of a run on several nodes: the job's, or without Slurm derived from what nodes have in ``common``."""
    job = _job(env)
    if rdzv_id and rdzv_id != env.get("SLURM_JOB_ID"):
        return valid_name(f"{job}-{rdzv_id}" if job else rdzv_id)
    if job:
        step = _step(env)
        inside = _number(env, "SLURM_STEP_NUM_NODES"), _number(env, "SLURM_JOB_NUM_NODES")
        return f"{job}-step-{step}" if step is not None and 1 < inside[0] < inside[1] else job
    return valid_name(common) if common else _timestamp()


def name_of_one_node(env: Mapping[str, str], rdzv_id: str | None, cwd: Path, program: Sequence[str]) -> str:
    """The name of a run on one node: in a job, one per step, task, choice of GPUs and command line.

    A requeued job derives the same name. Outside Slurm nothing starts a run again, so each gets a new name.
    """
    job = _job(env)
    if not job:
        return _timestamp()
    known = [_step(env), env.get("SLURM_PROCID"), _chosen_gpus(env), rdzv_id, str(cwd), *program]
    mark = hashlib.blake2b(json.dumps(known).encode(), digest_size=4).hexdigest()
    return f"{job}-{mark}"


def _job(env: Mapping[str, str]) -> str:
    """``job-ID``, for a task of an array ``job-ID_TASK`` as Slurm shows it, "" outside Slurm."""
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else env.get("SLURM_JOB_ID")
    return valid_name(f"job-{job}") if job else ""


def _step(env: Mapping[str, str]) -> int | None:
    step = _number(env, "SLURM_STEP_ID")
    return step if "SLURM_STEP_ID" in env and step < _SPECIAL_STEPS else None


def _chosen_gpus(env: Mapping[str, str]) -> str | None:
    """The GPUs that the script has picked out of the job's, None for all: those have other numbers after a requeue."""
    gpus = env.get("CUDA_VISIBLE_DEVICES")
    return gpus if gpus and len(gpus.split(",")) < _number(env, "SLURM_GPUS_ON_NODE") else None


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    return int(text) if text.isdecimal() else 0


def _timestamp() -> str:
    return time.strftime("run-%Y%m%d-%H%M%S") + f"-{os.getpid()}"


TRAINER = "opsd.trainer"
_MODEL = re.compile(r"^Model:\s*(\S.*)$", re.MULTILINE)


def keep_plan(program: Program, folder: Path, gpus: int) -> None:
    """Start `opsd plan` for a run on ``gpus`` GPUs, unless it has a plan or nothing can be planned; waits for nothing.

    It is begun before the ranks, and so none of what the launcher ends with them.
    """
    if words := plan_command(program, folder, gpus):
        quiet = subprocess.DEVNULL
        subprocess.Popen(words, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)


def plan_command(program: Program, folder: Path, gpus: int, proc: str = "/proc") -> list[str]:
    """What keeps the plan of the run in ``folder``; empty for other programs, unknown GPUs, and a run that has one."""
    if (program.kind, program.name) != ("module", TRAINER) or (folder / PLAN).exists():
        return []
    if (kind := _kind_of_gpus(proc)) is None:
        return []
    given = [word for word in program.args if word != "--fresh"]
    options = ["--as-is", "--gpus", str(gpus), "--gpu", kind, "--run", str(folder)]
    return [*OPSD, "plan", *options, *given]


def _kind_of_gpus(proc: str) -> str | None:
    """The kind of the first GPU that the NVIDIA driver lists here, None if plans do not know it."""
    for file in sorted(Path(proc, "driver/nvidia/gpus").glob("*/information")):
        try:
            found = _MODEL.search(file.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            return None
        return kind_of(found[1]) if found else None
    return None
