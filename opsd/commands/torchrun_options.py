"""The flags of torchrun: each is taken with torchrun's meaning, or refused in one sentence with the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import click

from opsd.commands.launch_options import local_size, node_count, rank_list, rdzv_settings, streams
from opsd.commands.options import Finite, options

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


_NO_FILTER = "all that a rank prints is in RUN_DIR/logs: leave the option out and search there"

torchrun_options = options(
    click.option(
        "--nproc-per-node",
        "local_size",
        default="1",
        show_default=True,
        callback=local_size,
        envvar="PET_NPROC_PER_NODE",
        metavar="N|cpu|gpu|auto",
        help="Ranks on this node.",
    ),
    click.option(
        "--nnodes",
        "count",
        default="1",
        show_default=True,
        callback=node_count,
        envvar="PET_NNODES",
        metavar="N|MIN:MAX",
        help="Nodes that run ranks; one launcher on each. Further nodes are spares. With MIN:MAX a run goes on with "
        "fewer than MAX, and one that comes later gets ranks at the next restart: by itself it causes none.",
    ),
    click.option(
        "--standalone",
        is_flag=True,
        envvar="PET_STANDALONE",
        help="One node, whatever is said about a meeting of several.",
    ),
    click.option(
        "--rdzv-backend",
        default="static",
        envvar="PET_RDZV_BACKEND",
        callback=_only(
            ("static", "c10d"),
            "launchers meet by themselves, without etcd or other services; leave it out, and without Slurm give "
            "--rdzv-endpoint HOST:PORT with the first node",
        ),
        metavar="static|c10d",
        help="Which of --rdzv-endpoint and --node-rank count, as for torchrun.",
    ),
    click.option(
        "--rdzv-endpoint",
        default="",
        envvar="PET_RDZV_ENDPOINT",
        metavar="HOST[:PORT]",
        help="Where the launchers of several nodes meet without Slurm: a port that is free on the first node.",
    ),
    click.option(
        "--rdzv-id",
        envvar="PET_RDZV_ID",
        help="The ranks' TORCHELASTIC_RUN_ID, the run's name by default; on several nodes it names the run.",
    ),
    click.option("--rdzv-conf", default="", envvar="PET_RDZV_CONF", callback=rdzv_settings, hidden=True),
    click.option("--node-rank", type=click.IntRange(0), envvar="PET_NODE_RANK", hidden=True),
    click.option(
        "--master-addr",
        envvar="PET_MASTER_ADDR",
        metavar="HOST",
        help="MASTER_ADDR, 127.0.0.1 by default; on several nodes also where the launchers meet without Slurm.",
    ),
    click.option(
        "--master-port",
        type=click.IntRange(1, 65535),
        envvar="PET_MASTER_PORT",
        help="MASTER_PORT of every generation; a fresh one for each by default.",
    ),
    click.option("--local-addr", default="", envvar="PET_LOCAL_ADDR", metavar="ADDRESS", help="This node's address."),
    click.option("--role", default="default", envvar="PET_ROLE", help="The ranks' ROLE_NAME."),
    click.option(
        "--max-restarts",
        type=click.IntRange(0),
        default=8,
        show_default=True,
        envvar="PET_MAX_RESTARTS",
        help="Restarts within any --restart-window committed steps; torchrun's default is 0.",
    ),
    click.option("--monitor-interval", type=Finite(0), envvar="PET_MONITOR_INTERVAL", hidden=True),
    click.option(
        "--start-method",
        default="spawn",
        envvar="PET_START_METHOD",
        callback=_only(("spawn", "fork", "forkserver"), "programs are always started by exec; leave it out"),
        hidden=True,
    ),
    click.option(
        "--event-log-handler",
        default="null",
        envvar="PET_EVENT_LOG_HANDLER",
        callback=_only(("null",), "events go to RUN_DIR/events.jsonl; leave it out, or say --events FILE"),
        hidden=True,
    ),
    click.option("-m", "--module", is_flag=True, envvar="PET_MODULE", help="PROGRAM is a module, as in python -m."),
    click.option("--no-python", is_flag=True, envvar="PET_NO_PYTHON", help="PROGRAM is any executable."),
    click.option("--run-path", is_flag=True, envvar="PET_RUN_PATH", hidden=True),
    click.option(
        "--log-dir",
        type=click.Path(path_type=Path),
        envvar="PET_LOG_DIR",
        help="Where logs go; RUN_DIR/logs by default.",
    ),
    click.option(
        "-r",
        "--redirects",
        default="0",
        callback=streams,
        envvar="PET_REDIRECTS",
        help="Streams that go to files of their own and not to the console: 1 stdout, 2 stderr, 3 both, 0 none; or by "
        "local rank, 0:3,1:2.",
    ),
    click.option(
        "-t",
        "--tee",
        default="0",
        callback=streams,
        envvar="PET_TEE",
        help="Streams that go to files of their own and to the console, each line with its rank; same form.",
    ),
    click.option(
        "--local-ranks-filter",
        "chosen",
        default="",
        callback=rank_list,
        envvar="PET_LOCAL_RANKS_FILTER",
        help="Show only these local ranks.",
    ),
    click.option(
        "--duplicate-stdout-filters",
        default="",
        envvar="PET_DUPLICATE_STDOUT_FILTERS",
        callback=_only(("",), _NO_FILTER),
        hidden=True,
    ),
    click.option(
        "--duplicate-stderr-filters",
        default="",
        envvar="PET_DUPLICATE_STDERR_FILTERS",
        callback=_only(("",), _NO_FILTER),
        hidden=True,
    ),
    click.option(
        "--logs-specs",
        default="",
        callback=_only(("",), "logs cannot be handed to a plug-in of torch; leave it out and read RUN_DIR/logs"),
        hidden=True,
    ),
    click.option(
        "--numa-binding",
        default="",
        callback=_only(("",), "ranks are not bound to CPUs; leave it out and bind with Slurm, or by numactl"),
        hidden=True,
    ),
    click.option(
        "--signals-to-handle",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        envvar="PET_SIGNALS_TO_HANDLE",
        callback=_signals,
        hidden=True,
    ),
    click.option(
        "--stop-timeout",
        "--shutdown-timeout",
        type=Finite(0),
        default=120.0,
        show_default=True,
        envvar=["PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"],
        help="Seconds to checkpoint and end after SIGTERM or SIGUSR1; a second signal leaves 20 s, a third none.",
    ),
    click.option(
        "--virtual-local-rank",
        is_flag=True,
        envvar="PET_VIRTUAL_LOCAL_RANK",
        help="Let each rank see its own GPU only, as device 0, with LOCAL_RANK=0.",
    ),
)
