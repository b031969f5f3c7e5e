"""The flags of torchrun: each is taken with torchrun's meaning, or refused in one sentence with the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from opsd.commands.launch_options import local_size, node_count, rank_list, rdzv_settings, streams
from opsd.commands.options import F, Seconds, option, options

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
