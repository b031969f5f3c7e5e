"""What the values of ``opsd launch``'s options mean; those of torchrun mean what they mean there."""

from __future__ import annotations

import os

import click

from opsd.launch.ranks.environment import gpu_count
from opsd.launch.ranks.rundir import RUN_NAME, new_run_name
from opsd.launch.run.fellows import Count


def local_size(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """``--nproc-per-node``: a number, or what the node has."""
    gpus = gpu_count(os.environ)
    cpus = len(os.sched_getaffinity(0))
    counts = {"cpu": cpus, "gpu": gpus, "auto": gpus or cpus}
    if value == "gpu" and gpus == 0:
        raise click.BadParameter("this node has no GPU that may be used; give a number, or cpu")
    if value in counts:
        return counts[value]
    if not value.isdigit() or not 0 < int(value) <= 1024:
        raise click.BadParameter(f"{value!r} is not a number of ranks from 1 to 1024, nor cpu, gpu or auto")
    return int(value)


def node_count(context: click.Context, parameter: click.Parameter, value: str) -> Count:
    """``--nnodes``: N or MIN:MAX."""
    try:
        return Count.parse(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a number of nodes nor MIN:MAX") from None


def run_name(context: click.Context, parameter: click.Parameter, value: str | None) -> str:
    """``--run-id``, or a name made from the job or the time."""
    name = value or new_run_name()
    if not RUN_NAME.fullmatch(name):
        raise click.BadParameter(f"{name!r} may have letters, digits, dot, dash and underscore only, 63 at most")
    return name


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


def shown_ranks(
    size: int, redirects: dict[int | None, int], tee: dict[int | None, int], chosen: frozenset[int] | None
) -> frozenset[int]:
    """The local ranks whose output goes to the console: those not redirected, or teed, and chosen if any are."""
    shown = set()
    for rank in range(size):
        redirected = redirects.get(rank, redirects.get(None, 0)) == 3
        teed = tee.get(rank, tee.get(None, 0)) != 0
        if (teed or not redirected) and (chosen is None or rank in chosen):
            shown.add(rank)
    return frozenset(shown)
