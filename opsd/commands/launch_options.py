"""The options of ``opsd launch``: those of torchrun have torchrun's meaning, or are refused with the way out."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from opsd import DISTRIBUTION
from opsd.commands.options import F, Seconds, option, options
from opsd.launch.ranks.settings import AUDITS, gpu_count
from opsd.launch.run.launchers import NodeCount, RendezvousOptions
from opsd.rundir import valid_name

C10D_PORT, MASTER_PORT = 29_400, 29_500
"""Torchrun's default ports."""
NOTIFY = "OPSD_NOTIFY"
"""Environment variable in place of ``--notify``."""
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_ENDPOINT = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<host>[\w.-]+))(?::(?P<port>[0-9]{1,5}))?")


def local_size(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """``--nproc-per-node``: a number, or what the node has."""
    gpus = gpu_count(os.environ)
    cpus = len(os.sched_getaffinity(0))
    counts = {"cpu": cpus, "gpu": gpus, "auto": gpus or cpus}
    if value == "gpu" and gpus == 0:
        raise click.BadParameter("this node has no GPU that may be used; give a number, or cpu")
    if value in counts:
        return counts[value]
    if not value.isdecimal() or not 0 < int(value) <= 1024:
        raise click.BadParameter(
            f"{value!r} is not a number of ranks from 1 to 1024, nor cpu, gpu or auto, which counts NVIDIA's GPUs; for "
            "other devices give the number"
        )
    return int(value)


def node_count(context: click.Context, parameter: click.Parameter, value: str) -> NodeCount:
    """``--nnodes``: N or MIN:MAX."""
    try:
        return NodeCount.parse(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a number of nodes nor MIN:MAX") from None


def run_name(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """``--run-id``: any text, as the name of a Slurm job is; None if there is none."""
    return valid_name(value) if value else None


def node_name(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """``--node-name``: what can be part of a file's name."""
    if value and not _NODE_NAME.fullmatch(value):
        raise click.BadParameter(
            f"{value!r:.80} cannot name a node: give letters, digits, '.', '_' and '-', first a letter or digit"
        )
    return value


def streams(context: click.Context, parameter: click.Parameter, value: str) -> dict[int | None, int]:
    """Torchrun's stream specification: 0 to 3 for all local ranks (key None), or rank:stream pairs."""
    pairs = [item.rpartition(":") for item in value.split(",")]
    try:
        streams = {int(rank) if colon else None: int(stream) for rank, colon, stream in pairs}
    except ValueError:
        streams = {None: -1}
    if not all(0 <= stream <= 3 for stream in streams.values()):
        raise click.BadParameter(f"{value!r} is neither 0, 1, 2 or 3 nor pairs such as 0:3,1:1")
    return streams


def rank_list(context: click.Context, parameter: click.Parameter, value: str) -> frozenset[int] | None:
    """``--local-ranks-filter``: numbers with commas; None for all."""
    if not value:
        return None
    try:
        return frozenset(int(item) for item in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of local ranks such as 0,1") from None


def rdzv_settings(context: click.Context, parameter: click.Parameter, value: str) -> dict[str, str]:
    """``--rdzv-conf``: pairs as torchrun takes them."""
    pairs = [item.partition("=") for item in value.split(",")] if value.strip() else []
    if not all(key.strip() and text.strip() for key, _, text in pairs):
        raise click.BadParameter(f"{value!r} is not a list of pairs such as join_timeout=600,timeout=900")
    return {key.strip(): text.strip() for key, _, text in pairs}


def rdzv_seconds(own: float, given: bool, conf: Mapping[str, str], *keys: str, least: float = 1.0) -> float:
    """``own`` if it was given as an option, else the first of ``keys`` that ``--rdzv-conf`` has, else ``own``.

    Raises click.BadParameter.
    """
    text = next((conf[key] for key in keys if conf.get(key)), None)
    if given or text is None:
        return own
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not least <= seconds < math.inf:
        raise click.BadParameter(f"--rdzv-conf: {text!r} is not a number of seconds from {least:g} on")
    return seconds


def rendezvous_options(
    count: NodeCount,
    spares: int,
    *,
    backend: str,
    endpoint: str,
    master: tuple[str | None, int | None],
    node_rank: int | None,
    local_address: str,
) -> RendezvousOptions | None:
    """The rendezvous that torchrun's flags describe, None for one node or without any. Raises click.UsageError.

    With ``static``, torchrun's default, nodes have ranks, and the endpoint may also be given as ``--master-addr`` and
    ``--master-port``; with ``c10d`` node ranks are ignored.
    """
    least, most = count.least + spares, count.most + spares
    address, port = master
    static = backend == "static"
    if most == 1 or not (endpoint.strip() or (static and address)):
        return None
    if endpoint.strip():
        host, at = parse_endpoint(endpoint, MASTER_PORT if static else C10D_PORT)
    else:
        assert address is not None
        host, at = parse_endpoint(_bracketed(address), MASTER_PORT)
        at = port or at
    if static and node_rank is not None and node_rank >= most:
        raise click.UsageError(f"--node-rank {node_rank} does not exist: --nnodes {count.most} counts from 0")
    return RendezvousOptions(host, at, least, most, node_rank if static else None, local_address)


def parse_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """``HOST[:PORT]``, an IPv6 address in brackets where a port follows. Raises click.UsageError."""
    match = _ENDPOINT.fullmatch(text.strip())
    if match is None:
        raise click.UsageError(
            f"{text!r} is no place to meet: give HOST:PORT, and [ADDRESS]:PORT where the address has colons"
        )
    port = int(match["port"]) if match["port"] else default_port
    if not 0 < port < 65536:
        raise click.UsageError(
            f"the launchers cannot meet at port {port}: all nodes must know it; give one from 1 to 65535"
        )
    return match["v6"] or match["host"], port


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address and not address.startswith("[") else address


_FILE = click.Path(path_type=Path)

own_options = options(
    option("--spares", type=click.IntRange(0), default=0, help="Nodes that stand by."),
    option(
        "--nodes",
        default="",
        metavar="HOSTLIST",
        help="Their names, n[1-4], or n1=ADDRESS,n2=…; those of the Slurm job by default.",
    ),
    option(
        "--node-name",
        metavar="NODE",
        callback=node_name,
        default="",
        help="The name of this node among them; Slurm's or the host's by default.",
    ),
    option(
        "--port",
        type=click.IntRange(1, 65535),
        help="Where the launchers listen; by default made from the Slurm job and the run.",
    ),
    option(
        "--node-timeout",
        type=Seconds(0.5, 300),
        default=1.5,
        help="Seconds of silence after which a node is lost, unless it is known to answer slowly.",
    ),
    option("--join-timeout", type=Seconds(1), default=600.0, help="Seconds within which the nodes must have come."),
    option(
        "--last-call",
        type=Seconds(0),
        default=30.0,
        help="With --nnodes MIN:MAX, or while a --segment is split: seconds to wait for more nodes at the start.",
    ),
    option(
        "--wait-for-node",
        type=Seconds(0),
        default=0.0,
        help="Seconds to wait for a node to come back when too few are left, before the run is given back to Slurm.",
    ),
    option(
        "--grow-after",
        type=Seconds(0),
        default=60.0,
        help="A run with fewer nodes than it may takes in spares after a checkpoint, once so many seconds of its work "
        "were missed for want of them: what a restart costs. 0: at its next restart only.",
    ),
    option(
        "--segment",
        type=click.IntRange(1),
        help="So many consecutive nodes are to share an NVLink domain or a leaf switch, as their TP or EP group needs; "
        "sbatch's --segment by default, or what a layout of the included trainer takes.",
    ),
    option(
        "--restart-window",
        type=click.IntRange(1),
        default=100,
        help="Committed steps after which earlier restarts no longer count.",
    ),
    option(
        "--max-same-failures",
        "--same-failures",
        "max_same_failures",
        type=click.IntRange(0),
        default=3,
        help="Stop when the same failure came this often without progress; 0: never for that.",
    ),
    option(
        "--hang-limit",
        type=Seconds(0),
        default=5.0,
        help="Seconds without any change that are a hang, unless three times the p99 step is longer; 0: never judge.",
    ),
    option(
        "--data-hang-limit",
        type=Seconds(1),
        default=20.0,
        help="The same while waiting for data; leaves the agent time to repair a loader.",
    ),
    option(
        "--startup-limit",
        type=Seconds(1),
        default=1800.0,
        help="Seconds without change allowed until the first three steps are done: loading, compiling.",
    ),
    option(
        "--unannounced-hang-limit",
        type=Seconds(0),
        default=60.0,
        help="The least --hang-limit of programs that do not report their phases.",
    ),
    option(
        "--idle-limit",
        type=Seconds(0),
        default=600.0,
        help="Seconds in which a rank uses neither CPU nor GPU and moves no data that are a hang; 0: never.",
    ),
    option(
        "--no-observe",
        is_flag=True,
        help="Do not hook the programs' calls of torch: those that report nothing themselves have no rank page then, "
        "and trainers of Hugging Face and TRL are not audited.",
    ),
    option(
        "--audit",
        type=click.Choice(AUDITS),
        default=AUDITS[0],
        help="What a finding in the first batches of a Hugging Face or TRL trainer does, before its first step: refuse "
        "the run, or warn; off: do not look. only: end after the audit.",
    ),
    option(
        "--evaluation",
        default="",
        metavar="COMMAND",
        help="Evaluate each checkpoint of a Hugging Face or TRL trainer with COMMAND, such as lm_eval. {model} in it "
        "is the checkpoint, {output} the folder for results.",
    ),
    option(
        "--evaluation-queue",
        default="{command}",
        metavar="COMMAND",
        help="How an evaluation is started, such as sbatch --gpus=1 --wrap={command}; by default on the first node of "
        "the run, beside the ranks.",
    ),
    option(
        "--beside",
        multiple=True,
        metavar="COMMAND",
        help="Start COMMAND, such as a server for rollouts, with each generation, on its first node.",
    ),
    option(
        "--beside-health",
        multiple=True,
        metavar="URL",
        help="The URL that answers below 400 once the companion is ready; one for each --beside, in their order.",
    ),
    option(
        "--beside-gpus",
        multiple=True,
        metavar="GPUS",
        help="The CUDA_VISIBLE_DEVICES of the companion; one for each --beside, in their order.",
    ),
    option("--beside-public", is_flag=True, help="Companions may listen on all addresses."),
    option("--no-standby", is_flag=True, help="Keep no warm interpreters for the next restart."),
    option("--standby-import", multiple=True, metavar="MODULE", help="Import MODULE too in warm interpreters."),
    option(
        "--log-size",
        type=click.IntRange(0),
        default=64,
        help="MiB after which the log of a rank starts again; the two before are kept. 0: never.",
    ),
    option(
        "--run-id",
        "run",
        callback=run_name,
        metavar="NAME",
        help="Name of the run; from the Slurm job or the time by default.",
    ),
    option(
        "--run-dir", type=_FILE, metavar="DIR", help="Folder kept for the run; ~/.local/state/opsd/runs/RUN by default."
    ),
    option(
        "--notify",
        multiple=True,
        envvar=NOTIFY,
        metavar="URL|FILE",
        help="Tell people of start, restarts, standstill and end: URL of a webhook (Slack, Discord, Teams, any), with "
        f"{DISTRIBUTION}[notify] also of mail and what else apprise knows; a FILE has one a line. Other users of the "
        "node see command lines: rather set OPSD_NOTIFY, or give a file.",
    ),
    option(
        "--take-over",
        is_flag=True,
        help="Continue the run even if another job or launcher still has it; that one stops with exit code 76.",
    ),
    option(
        "--give-way",
        is_flag=True,
        help="Make no report if the run is stopped and can go on: its nodes are free a second earlier.",
    ),
    option("--events", type=_FILE, metavar="FILE", help="Also write the events to FILE, one JSON object a line."),
)
"""Those that torchrun does not have."""


OPTIONS = frozenset(
    {
        "nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "standalone",
        "max-restarts", "monitor-interval", "start-method", "event-log-handler", "role", "module", "no-python",
        "run-path", "log-dir", "redirects", "tee", "local-ranks-filter", "duplicate-stdout-filters",
        "duplicate-stderr-filters", "node-rank", "master-addr", "master-port", "local-addr", "logs-specs",
        "numa-binding", "signals-to-handle", "shutdown-timeout", "virtual-local-rank",
    }
)  # fmt: skip
"""The long options of ``torch.distributed.run`` in torch 2.13; a test compares them with the torch that is there."""

HANDLED_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")

Callback = Callable[[click.Context, click.Parameter, str], str]


def full_name(token: str, own: Iterable[str]) -> str:
    """The option that ``token`` stands for, without dashes in front: argparse takes any beginning that is unique.

    Where it could be one of torchrun's or of ``own``, it is torchrun's: that is what such a line was written for.
    """
    token = token.replace("_", "-")
    own = frozenset(own)
    if len(token) == 1 or token in OPTIONS or token in own:
        return token
    for names in (OPTIONS, own):
        found = [name for name in names if name.startswith(token)]
        if found:
            return found[0] if len(found) == 1 else token
    return token


def _only(allowed: Iterable[str], why: str) -> Callback:
    """Take these values, which change nothing here, and refuse others with the reason."""

    def check(context: click.Context, parameter: click.Parameter, value: str) -> str:
        if value not in allowed:
            raise click.BadParameter(f"{value!r} is not possible here: {why}")
        return value

    return check


def _signals(context: click.Context, parameter: click.Parameter, value: str) -> str:
    unknown = [name for item in value.split(",") if (name := item.strip().upper()) not in (*HANDLED_SIGNALS, "")]
    if unknown:
        raise click.BadParameter(
            f"the ranks are stopped in good order on {', '.join(HANDLED_SIGNALS)} and not on {unknown[0]}; send one of "
            "these, as with #SBATCH --signal=USR1@300, and leave the option out"
        )
    return value


def _option(*names: str, **attributes: Any) -> Callable[[F], F]:
    """An option that can also be set by torchrun's environment variable, PET_ and the option's name."""
    long = next(name for name in names if name.startswith("--"))
    return option(*names, **{"envvar": f"PET_{long[2:].replace('-', '_').upper()}", **attributes})


_NO_FILTER = "all that a rank prints is in RUN_DIR/logs: leave the option out and search there"

torchrun_options = options(
    _option(
        "--nproc-per-node",
        "local_size",
        default="1",
        callback=local_size,
        metavar="N|cpu|gpu|auto",
        help="Ranks on this node.",
    ),
    _option(
        "--nnodes",
        "count",
        default="1",
        callback=node_count,
        metavar="N|MIN:MAX",
        help="Nodes that run ranks; one launcher on each. Further nodes are spares. With MIN:MAX a run goes on with "
        "fewer than MAX, and one that comes later gets ranks at the next restart: by itself it causes none.",
    ),
    _option("--standalone", is_flag=True, help="One node, whatever is said about a meeting of several."),
    _option(
        "--rdzv-backend",
        default="static",
        callback=_only(
            ("static", "c10d"),
            "launchers meet by themselves, without etcd or other services; leave it out, and without Slurm give "
            "--rdzv-endpoint HOST:PORT with the first node",
        ),
        metavar="static|c10d",
        help="Which of --rdzv-endpoint and --node-rank count, as for torchrun.",
    ),
    _option(
        "--rdzv-endpoint",
        default="",
        metavar="HOST[:PORT]",
        help="Where the launchers of several nodes meet without Slurm: a port that is free on the first node.",
    ),
    _option(
        "--rdzv-id",
        metavar="ID",
        help="The ranks' TORCHELASTIC_RUN_ID, the run's name by default; on several nodes it names the run.",
    ),
    _option("--rdzv-conf", default="", callback=rdzv_settings, hidden=True),
    _option("--node-rank", type=click.IntRange(0), hidden=True),
    _option(
        "--master-addr",
        metavar="HOST",
        help="MASTER_ADDR, 127.0.0.1 by default; on several nodes also where the launchers meet without Slurm.",
    ),
    _option(
        "--master-port",
        type=click.IntRange(1, 65535),
        help="MASTER_PORT of every generation; a fresh one for each by default.",
    ),
    _option("--local-addr", default="", metavar="ADDRESS", help="This node's address."),
    _option("--role", default="default", metavar="NAME", help="The ranks' ROLE_NAME."),
    _option(
        "--max-restarts",
        type=click.IntRange(0),
        default=8,
        help="Restarts within any --restart-window committed steps; torchrun's default is 0.",
    ),
    _option("--monitor-interval", type=Seconds(0), hidden=True),
    _option(
        "--start-method",
        default="spawn",
        callback=_only(("spawn", "fork", "forkserver"), "programs are always started by exec; leave it out"),
        hidden=True,
    ),
    _option(
        "--event-log-handler",
        default="null",
        callback=_only(("null",), "events go to RUN_DIR/events.jsonl; leave it out, or say --events FILE"),
        hidden=True,
    ),
    _option("-m", "--module", is_flag=True, help="PROGRAM is a module, as in python -m."),
    _option("--no-python", is_flag=True, help="PROGRAM is any executable."),
    _option("--run-path", is_flag=True, hidden=True),
    _option(
        "--log-dir", type=click.Path(path_type=Path), metavar="DIR", help="Where logs go; RUN_DIR/logs by default."
    ),
    _option(
        "-r",
        "--redirects",
        metavar="STREAMS",
        default="0",
        callback=streams,
        help="Streams that go to files of their own and not to the console: 1 stdout, 2 stderr, 3 both, 0 none; or by "
        "local rank, 0:3,1:2.",
    ),
    _option(
        "-t",
        "--tee",
        metavar="STREAMS",
        default="0",
        callback=streams,
        help="Streams that go to files of their own and to the console, each line with its rank; same form.",
    ),
    _option(
        "--local-ranks-filter",
        "chosen",
        default="",
        callback=rank_list,
        metavar="RANK,…",
        help="Show only these local ranks.",
    ),
    _option("--duplicate-stdout-filters", default="", callback=_only(("",), _NO_FILTER), hidden=True),
    _option("--duplicate-stderr-filters", default="", callback=_only(("",), _NO_FILTER), hidden=True),
    _option(
        "--logs-specs",
        default="",
        callback=_only(("",), "logs cannot be handed to a plug-in of torch; leave it out and read RUN_DIR/logs"),
        hidden=True,
        envvar=None,
    ),
    _option(
        "--numa-binding",
        default="",
        callback=_only(("",), "ranks are not bound to CPUs; leave it out and bind with Slurm, or by numactl"),
        hidden=True,
        envvar=None,
    ),
    _option("--signals-to-handle", default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", callback=_signals, hidden=True),
    _option(
        "--stop-timeout",
        "--shutdown-timeout",
        type=Seconds(0),
        default=120.0,
        envvar=["PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"],
        help="Seconds to checkpoint and end after SIGTERM or SIGUSR1; a second signal leaves 20 s, a third none.",
    ),
    _option(
        "--virtual-local-rank", is_flag=True, help="Let each rank see its own GPU only, as device 0, with LOCAL_RANK=0."
    ),
)
