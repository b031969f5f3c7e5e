"""The scenario format: one TOML file has one timeline and the incidents and actions expected from the agent.

A scenario starts with a healthy node: GPUs under load, a job that has trained for a while, a launcher. ``[[at]]`` says
what changes when, and ``[[on]]`` what an action of opsd changes. ``[[expect]]`` names the incident that must open, with
its delay and culprit, and the actions in each policy mode. An incident that is neither expected nor listed in
``allow`` is a false alarm. A scenario without ``[[expect]]`` is healthy::

    title = "The fan of one GPU fails"
    duration = 90

    [[at]]
    t = 30
    gpu = 2
    set."opsd_gpu_throttle_seconds_total{reason=sw_thermal}" = { rate = 1 }
    set.DCGM_FI_DEV_GPU_TEMP = { to = 89, over = 5 }

    [[on]]
    action = "set_power_limit"
    after = 2
    gpu = 2
    set."opsd_gpu_throttle_seconds_total{reason=sw_thermal}" = { rate = 0 }

    [[expect]]
    kind = "gpu_throttle"
    culprit = { gpu = 2, rank = 2 }
    within = 10
    actions = ["set_power_limit", "notify"]
    state = { observe = "open", act = "resolved" }
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opsd.files import read_settings

Mode = Literal["observe", "recommend", "act"]
MODES: tuple[Mode, ...] = ("observe", "recommend", "act")


class ScenarioError(Exception):
    """An invalid scenario file; the message says where and why."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Course(_Part):
    """How a series changes from now on: ``rate`` per second, ``to`` a value ``over`` seconds, or ``add`` once."""

    rate: float | None = None
    to: float | None = None
    over: float = Field(0.0, ge=0)
    add: float | None = None
    noise: float | None = Field(None, ge=0, description="Standard deviation around the course.")


Value = float | Literal["absent"] | Course


class Crash(_Part):
    """The process of a rank ends. ``error`` is the exception it left: type, message, where."""

    exit: str = "signal SIGKILL"
    error: dict[str, str] | None = None
    log: str = ""
    restarts: bool = Field(True, description="False: the launcher gives up.")


class Hang(_Part):
    """The launcher detects a hang and blames the first of ``ranks``, or no rank."""

    nobody: bool = False
    limit_s: float = 5.0
    reason: str = ""
    restarts: bool = True


class Change(_Part):
    """What changes at one moment. ``gpu`` and ``ranks`` say where; without them it is all of them."""

    gpu: int | None = None
    set: dict[str, Value] = Field(default_factory=dict, description='Series as "name" or "name{label=value}".')
    lost: str | None = Field(
        None, description="The GPU no longer answers; the text is the driver's. Empty: back again."
    )

    ranks: tuple[int, ...] | None = None
    process: str | None = Field(None, description="State letter of the process: T, Z, D stop it, S and R continue it.")
    stall: str | None = Field(None, description="The phase that the rank does not leave; empty: continue.")
    slow: dict[str, float] | None = Field(None, description="Phase -> factor on its duration.")
    creep: dict[str, float] | None = Field(None, description="Phase -> increase of that factor per step.")
    worker: str | None = Field(None, description="State letter of the loader process; empty: there is none.")
    pause: dict[str, float] | None = Field(None, description="Phase -> seconds, once, at the next step boundary.")
    crash: Crash | None = None
    hang: Hang | None = None
    loss: Value | None = Field(None, description="Of the whole run, or of the chosen ranks only.")
    grad_norm: Value | None = None
    commits: bool | None = Field(None, description="False: checkpoints no longer become durable.")
    remote_stuck: bool | None = Field(None, description="A rank of another node does not join the collective.")

    event: dict[str, object] | None = Field(None, description="A launcher or rank event: event, and its fields.")
    restart: str | None = Field(None, description="The launcher restarts the generation for this reason.")
    finish: bool = Field(False, description="The run ends normally.")
    launcher: Literal["dead"] | None = None

    kernel: tuple[str, ...] = Field((), description="Lines that the kernel logs.")
    blind: tuple[str, ...] = Field((), description="Collectors that fail from now on.")
    hung: tuple[str, ...] = Field((), description="Collectors that do not return from now on.")
    sighted: tuple[str, ...] = Field((), description="Collectors that work again.")
    read_again: bool = Field(False, description="The event files of the run are read again from their beginning.")
    agent_restart: bool = Field(False, description="The agent ends and starts again, with its journal.")
    agent_killed: bool = Field(False, description="As agent_restart, but the window is as it was saved last.")
    reboot: bool = Field(False, description="The node is booted: its ranks are gone, its counters begin at 0.")
    late: float | None = Field(None, ge=0, description="Seconds after which events of the run arrive from now on.")
    clock: float = Field(0.0, description="A step of the wall clock, in seconds.")


class Moment(Change):
    """A change at second ``t``, repeated every ``every`` seconds, ``times`` times in total."""

    t: float = Field(ge=0)
    every: float = Field(0.0, ge=0)
    times: int = Field(1, ge=1)


class Reaction(Change):
    """What an action changes, ``after`` seconds later; ``fails`` is why the action fails, "" if it succeeds."""

    action: str
    after: float = Field(0.5, ge=0)
    fails: str = ""


class ScenarioJob(_Part):
    """The job on the node. Local rank i runs on GPU i."""

    run: str = "smol"
    job: str = "4242"
    ranks: int = Field(default=4, ge=0, le=16)
    world_size: int = 0
    step_s: float = Field(default=1.0, gt=0)
    launcher: bool = True
    warm_steps: int = Field(default=70, ge=0, description="Steps done before second 0; 0: the job starts at second 0.")
    first_step_s: float = 1.0
    setup_s: float = 2.0
    restart_s: float = 2.0
    checkpoint_every: int = 50
    checkpoint_s: float = 0.3
    commit_s: float = Field(
        default=1.0, description="Seconds from the end of a checkpoint's pause until it is durable."
    )
    loss: float = 2.5


class Expectation(_Part):
    """An incident that must open. ``culprit`` has the fields that must match; ``at`` is when the fault begins."""

    kind: str
    culprit: dict[str, str | int] = Field(default_factory=dict)
    severity: Literal["info", "warning", "critical"] | None = None
    at: float | None = None
    within: float = Field(gt=0, description="Seconds from the fault to the incident, at most.")
    actions: tuple[str, ...] = Field((), description="Verbs carried out in mode act, in their order.")
    state: dict[Mode, Literal["open", "acting", "verifying", "resolved", "unproven", "escalated"]] = Field(
        default_factory=dict
    )
    evidence: tuple[str, ...] = Field((), description="Texts that the evidence, summary or cost must contain.")
    symptoms: tuple[str, ...] = Field((), description="Kinds that must be symptoms of this one; may open before it.")


class Scenario(_Part):
    """One timeline. ``title`` is one sentence; ``gpus`` of the node, ``seed`` of the noise."""

    title: str
    duration: float = Field(60.0, gt=0, le=86_400)
    gpus: Annotated[int, Field(ge=0, le=16)] = 4
    seed: int = 0
    job: ScenarioJob = ScenarioJob()
    at: tuple[Moment, ...] = ()
    on: tuple[Reaction, ...] = ()
    expect: tuple[Expectation, ...] = ()
    allow: tuple[str, ...] = Field((), description="Further kinds that may open: known symptoms of the expected one.")
    modes: tuple[Mode, ...] = Field(
        default=(), description="Modes to play; by default all, for a healthy one act only."
    )

    @property
    def played_in(self) -> tuple[Mode, ...]:
        """The modes to play; a healthy scenario is played in one only, as modes differ in what follows an incident."""
        return self.modes or (MODES if self.expect else ("act",))

    def moments(self) -> list[tuple[float, Change]]:
        """Every change with its second, repetitions unrolled, sorted by time."""
        unrolled = [(m.t + n * m.every, m) for m in self.at for n in range(m.times)]
        return sorted(unrolled, key=lambda moment: moment[0])

    def fault_at(self, expectation: Expectation) -> float:
        """When the fault of ``expectation`` begins; by default with the first change."""
        return expectation.at if expectation.at is not None else min((m.t for m in self.at), default=0.0)


def load(path: Path) -> Scenario:
    """Read a scenario file. Raises ScenarioError."""
    try:
        return Scenario.model_validate(tomllib.loads(read_settings(path).decode()))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ScenarioError(f"{path}: {where}: {first['msg']}") from error


def files(folder: Path) -> Iterator[Path]:
    """The scenario files under ``folder``, which has one folder per kind of incident, sorted."""
    yield from sorted(folder.glob("*/*.toml"))
