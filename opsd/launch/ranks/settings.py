"""The settings for starting ranks: program, place among the nodes, environment, and options of the command line.

Other Pythons than opsd's that ranks run with: whether they can, and what the active one has installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Literal

from opsd.launch.io.console import STDERR, STDOUT, Routing
from opsd.launch.ranks.leftovers import JOB, LAUNCHER, NODE, RUN_DIR
from opsd.launch.ranks.process import launcher_mark
from opsd.rundir import RECORDER
from opsd.words import plural

OLDEST = (3, 11)
"""The first that can run ``worker.py``."""
_ANSWER_S = 60.0


def why_unfit(python: str) -> str:
    """Why ``python`` cannot run ranks, in words; "" if it can, or does not say."""
    if shutil.which(python) is None:
        return "cannot be executed"
    ask = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        said = subprocess.run(
            ask,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
        )
        version = tuple(map(int, said.stdout.splitlines()[-1].split()))
    except subprocess.CalledProcessError as error:
        last = (error.stderr.splitlines() or [f"exit code {error.returncode}"])[-1]
        return f"does not start: {last}"
    except OSError as error:
        return f"cannot be executed: {error.strerror}"
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return ""
    oldest, found = (".".join(map(str, each)) for each in (OLDEST, version))
    return f"is Python {found}; ranks need {oldest} or later" if version < OLDEST else ""


def python_with(module: str, environ: Mapping[str, str] = os.environ, own: str = sys.prefix) -> str:
    """The sentence that ``PYTHON_EXEC=python`` takes a Python which has ``module``; "" if that is not seen.

    Looks at files and runs nothing. ``own`` is the prefix of the ranks' Python, as ``sys.prefix`` is.
    """
    python = shutil.which("python", path=environ.get("PATH"))
    named = all(part.isidentifier() for part in module.split("."))
    if not (named and python) or environ.get("PYTHON_EXEC"):
        return ""
    prefix = Path(python).absolute().parent.parent
    try:
        if prefix.samefile(own) or not any(_has(folder, module) for folder in _packages(prefix)):
            return ""
    except OSError:
        return ""
    return f". The ranks run with {sys.executable}; PYTHON_EXEC=python takes that of {prefix}, which has {module}"


def _packages(prefix: Path) -> list[Path]:
    """The folders of packages below ``prefix``, of a Python that can run ranks, and those that they name."""
    folders = []
    for folder in prefix.glob("lib*/python3*/*-packages"):
        minor = folder.parent.name.removeprefix("python3").removeprefix(".").rstrip("t")
        if not minor or (minor.isdecimal() and (3, int(minor)) >= OLDEST):
            named = (line for file in folder.glob("*.pth") for line in file.read_text(errors="replace").splitlines())
            folders += [folder, *(folder / line for line in named if line and not line.startswith(("import", "#")))]
    return folders


def _has(folder: Path, module: str) -> bool:
    path = folder.joinpath(*module.split("."))
    return path.is_dir() or path.with_name(f"{path.name}.py").is_file() or any(path.parent.glob(f"{path.name}.*.so"))


AUDITS = ("refuse", "warn", "off", "only")
"""What ``OPSD_AUDIT`` may be, the default first."""
PREFIX = "[rank${rank}]: "
StreamMap = Mapping[int | None, int]
"""Streams by local rank: 0 none, 1 stdout, 2 stderr, 3 both. The key None is for all others."""
RESTART_VARIABLES = frozenset(
    [
        *("MASTER_ADDR", "MASTER_PORT", "OPSD_GENERATION", "OPSD_RANK_PAGE", "TORCHELASTIC_ERROR_FILE"),
        "TORCHELASTIC_RESTART_COUNT",
    ]
)
"""Variables that may differ at each restart of a rank. A standby gets another page path than the living rank."""
GENERATION_VARIABLES = RESTART_VARIABLES | frozenset(
    [
        *("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
        *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    ]
)
"""All variables of ``Settings.generation_environment``."""


class ProgramNotFound(Exception):
    """The program does not exist or cannot be executed; the message says which."""


@dataclass(frozen=True, slots=True)
class Program:
    """A Python script, a module as in ``python -m``, or any executable. ``python`` runs the first two.

    ``given`` is ``name`` as the user wrote it: ``sys.argv[0]`` of a script. ``observe``: its calls of torch are hooked
    to report its progress.
    """

    kind: Literal["script", "module", "executable"]
    name: str
    args: tuple[str, ...]
    python: str
    cwd: Path
    given: str = ""
    observe: bool = True

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments after ``python``."""
        return (*(("-m",) if self.kind == "module" else ()), self.given or self.name, *self.args)

    @property
    def path(self) -> str:
        """``sys.path[0]`` of the program, as Python sets it."""
        return str(Path(self.name).resolve().parent) if self.kind == "script" else str(self.cwd)

    @classmethod
    def find(cls, kind: Literal["script", "module", "executable"], name: str, args: tuple[str, ...]) -> Program:
        """The program ``name`` as seen from the working directory. Raises ProgramNotFound.

        Of a module the first name is looked up, which imports nothing; the rank itself looks for the rest, and for all
        of it if its interpreter is another one or sees other places.
        """
        try:
            cwd, given = Path.cwd(), name
        except FileNotFoundError:
            raise ProgramNotFound("the working directory does not exist any more") from None
        if kind == "script":
            name = os.path.join(cwd, name)  # noqa: PTH118  # Python's __file__ keeps what a Path would tidy up
            if not Path(name).is_file():
                raise ProgramNotFound(f"there is no file {name}")
            if not os.access(name, os.R_OK):
                raise ProgramNotFound(f"{name} may not be read by this user")
        elif kind == "executable":
            found = shutil.which(name)
            if found is None:
                raise ProgramNotFound(f"there is no program {name} that can be executed")
            name = str(Path(found).absolute()) if os.sep in name else found
        python = os.environ.get("PYTHON_EXEC", "")
        if python and (refusal := why_unfit(python)):
            raise ProgramNotFound(f"the interpreter {python}, named by PYTHON_EXEC, {refusal}")
        python = python or sys.executable
        if kind == "module" and python == sys.executable and not _is_importable(name.partition(".")[0], cwd):
            raise ProgramNotFound(f"there is no module {name}" + python_with(name))
        return cls(kind, name, args, python, cwd, given)


def _is_importable(name: str, cwd: Path) -> bool:
    """Whether ``python -m`` in ``cwd`` may find the package or module ``name``."""
    if sys.flags.isolated or sys.flags.ignore_environment or sys.flags.no_user_site:
        return True  # a rank sees more places than this interpreter
    try:
        return bool(PathFinder.find_spec(name, [str(cwd)]) or find_spec(name))
    except (ImportError, ValueError):
        return True


@dataclass(frozen=True, slots=True)
class Streams:
    """Torchrun's flags for the ranks' output. ``chosen``: local ranks that are shown at all, None for all.

    ``redirects`` go to separate files and not to the console; ``tee`` goes to both, each line after ``prefix``.
    """

    redirects: StreamMap = field(default_factory=dict)
    tee: StreamMap = field(default_factory=dict)
    chosen: frozenset[int] | None = None
    prefix: str = PREFIX

    def show(self, stream: int, local_rank: int, names: Mapping[str, object]) -> Routing:
        """The routing of a rank's stream; ``names`` are the variables of the prefix."""
        redirected, teed = (
            bool(streams.get(local_rank, streams.get(None, 0)) & stream) for streams in (self.redirects, self.tee)
        )
        visible = self.chosen is None or local_rank in self.chosen
        return Routing(
            shown=visible and (teed or not redirected),
            prefix=Template(self.prefix).safe_substitute(names) if teed else "",
            own_file=redirected or teed,
        )


@dataclass(frozen=True, slots=True)
class Assignment:
    """This node's place in a generation; it has the ranks ``rank_offset`` to ``rank_offset + local_size - 1``."""

    node_rank: int
    nodes: int
    rank_offset: int
    local_size: int
    world_size: int
    master_addr: str
    master_port: int


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a launcher; times in seconds.

    ``restarts_asked``: the user set ``max_restarts``. ``virtual_local_rank``: each rank sees its own GPU only, as local
    rank 0. ``resume``: the command that goes on with the run. ``evaluation``: see
    ``opsd.adapters.evaluating``. ``gives_way``: a run that is stopped makes no report.
    """

    program: Program
    run: str
    job: str
    node: str
    local_size: int
    run_id: str
    role: str = "default"
    max_restarts: int = 8
    restarts_asked: bool = False
    max_same_failures: int = 3
    refill_steps: int = 100
    standby: bool = True
    standby_imports: tuple[str, ...] = ()
    stop_timeout_s: float = 120.0
    streams: Streams = Streams()
    virtual_local_rank: bool = False
    resume: str = ""
    audit: str = AUDITS[0]
    evaluation: str = ""
    gives_way: bool = False
    color: bool = False
    """Whether what ranks print ends on a terminal."""

    def shows(self, rank: int, local_rank: int) -> dict[int, Routing]:
        """The routing of a rank's streams."""
        names = {"rank": rank, "local_rank": local_rank, "role_name": self.role}
        return {stream: self.streams.show(stream, local_rank, names) for stream in (STDOUT, STDERR)}

    def environment(self, local_rank: int, run_dir: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The environment of ``local_rank`` that is the same in every generation, at any place of its node."""
        gpu = gpu_of(base, local_rank)
        threads = {"OMP_NUM_THREADS": "1"} if self.local_size > 1 else {}
        environment = {
            **threads,
            **({"OPSD_COLOR": "1"} if self.color else {}),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            **flight_recorder(run_dir, base),
            **base,
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            **self.marks(run_dir),
            "OPSD_RUN": self.run,
            "OPSD_AUDIT": self.audit,
            **({"OPSD_EVALUATION": self.evaluation} if self.evaluation else {}),
            "OPSD_GPU": "" if gpu is None else str(gpu),
        }
        return own_gpu_only(environment, local_rank) if self.virtual_local_rank else environment

    def marks(self, run_dir: Path) -> dict[str, str]:
        """The variables by which all that the launcher starts for the run is found once it is gone."""
        return {LAUNCHER: launcher_mark(), RUN_DIR: str(run_dir), JOB: self.job, NODE: self.node}

    def generation_environment(
        self, place: Assignment, local_rank: int, *, generation: int, restarts: int, error_file: Path, page: Path
    ) -> dict[str, str]:
        """The variables of a rank that depend on its place and on the generation."""
        rank = str(place.rank_offset + local_rank)
        world = str(place.world_size)
        return {
            "RANK": rank,
            "WORLD_SIZE": world,
            "GROUP_RANK": str(place.node_rank),
            "GROUP_WORLD_SIZE": str(place.nodes),
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": world,
            "ROLE_NAME": self.role,
            "MASTER_ADDR": place.master_addr,
            "MASTER_PORT": str(place.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_ERROR_FILE": str(error_file),
            "OPSD_RANK_PAGE": str(page),
            "OPSD_GENERATION": str(generation),
        }


def flight_recorder(run_dir: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The variables with which torch records collectives, and dumps them when one times out; the user's own win.

    Torch puts the rank behind the name of the file. It warns of the older names, so ``dumps.py`` sets them only where
    a release knows no others.
    """
    values = {
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): str(run_dir / RECORDER / "rank_"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
    }
    return {names[0]: value for names, value in values.items() if base.keys().isdisjoint(names)}


def own_gpu_only(environment: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """The environment of a rank that sees only its own GPU, as device 0; ``OPSD_GPU`` stays the node's index."""
    gpus = [gpu.strip() for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]
    own = gpus[local_rank] if local_rank < len(gpus) else str(local_rank)
    return {**environment, "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": own}


def gpu_of(env: Mapping[str, str], local_rank: int, proc: str = "/proc") -> int | None:
    """The index of the GPU that ``local_rank`` will use, None without GPUs or if they are named by UUID."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return local_rank if local_rank < gpu_count(env, proc) else None
    entries = [entry.strip() for entry in visible.split(",")]
    return int(entries[local_rank]) if local_rank < len(entries) and entries[local_rank].isdigit() else None


def too_few_gpus(ranks: int, env: Mapping[str, str], proc: str = "/proc") -> str:
    """What to say if fewer GPUs than ``ranks`` may be used here, "" otherwise, and if there is none."""
    count = gpu_count(env, proc)
    if not 0 < count < ranks:
        return ""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    why = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
    return (
        f"{ranks} ranks on this node have {plural(count, 'GPU')}{why}: a rank without its own fails or shares one; "
        f"--nproc-per-node {count} starts one rank for each GPU"
    )


def gpu_count(env: Mapping[str, str], proc: str = "/proc") -> int:
    """GPUs that a rank may use: those in CUDA_VISIBLE_DEVICES if set, otherwise those the NVIDIA driver lists."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    try:
        return len(list(Path(proc, "driver/nvidia/gpus").iterdir()))
    except OSError:
        return 0
