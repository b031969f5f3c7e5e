"""``opsd spare``: the pool of spares, and this node as one of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import click

from opsd import exitcodes
from opsd.commands.options import Finite, Group, config_options, exit_codes, option
from opsd.commands.output import fail
from opsd.commands.settings import load
from opsd.config import Settings
from opsd.preflight.engine import SelectionError
from opsd.preflight.history import HistoryError
from opsd.preflight.report import ReportError
from opsd.progress import Look, shown
from opsd.slurm.connect import choose
from opsd.slurm.port import SlurmError
from opsd.spares import pool, readiness
from opsd.spares.pool import SpareState
from opsd.spares.stage import remove
from opsd.spares.stage import stage as copy
from opsd.spares.stage import verify as compare
from opsd.spares.transfer import (
    Corpus,
    Folder,
    RateLimit,
    StageError,
    Storage,
    StorageError,
    Work,
    digest_of,
    needs_proof,
    open_storage,
    proven,
    read_corpora,
    sha256_of,
)
from opsd.words import clock


@click.group(
    cls=Group,
    epilog=exit_codes(
        {
            0: "done",
            1: "not ready, no spare, damaged, or Slurm or the storage refused",
            2: "the command line or the configuration is wrong",
        }
    ),
)
@config_options
@click.pass_context
def spare(ctx: click.Context, file: Path | None, overrides: tuple[str, ...]) -> None:
    """Nodes kept ready to take the place of another one."""
    ctx.obj = load(file, overrides)


@spare.command("list")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def list_spares(settings: Settings, as_json: bool) -> int:
    """Show each spare of the pool: ready, or why not.

    The pool is the nodes of the reservation and those that are marked in Slurm by `opsd spare verify`. Exits with 1 if
    none is ready.
    """
    try:
        spares = pool.pool(choose().slurm, settings.spare.reservation, settings.spare.max_age_s, time.time())
    except SlurmError as error:
        fail(f"Slurm: {error}")
    ready = [found for found in spares if found.ready]
    if as_json:
        click.echo(json.dumps({"spares": [{**asdict(s), "ready": s.ready} for s in spares]}, indent=1))
    for found in () if as_json else spares:
        said = f"ready, verified {clock(found.since)}" if found.ready else f"not ready: {found.why_not}"
        click.echo(f"{found.node}  {said}")
    if not spares:
        click.echo("opsd: the pool has no node; `opsd spare reserve`, or `opsd spare stage` on a node", err=True)
    return exitcodes.OK if ready else exitcodes.FAILED


@spare.command()
@option("--rate", type=Finite(min=0, min_open=True), help="MB/s at most. Default: spare.rate_mb_s.")
@click.pass_obj
def stage(settings: Settings, rate: float | None) -> int:
    """Copy the shards at spare.source to spare.folder of this node.

    Can be stopped and started again at any time: what is there is not copied twice. A file gets its name once its
    content agrees with its checksum. After damage the node is ready only once `opsd spare verify` has read all again.
    """
    here = Here.of(settings)
    storage, corpora = _or_fail(here.wanted)
    with shown("staging") as look:
        work = _work(settings, rate, look)
        done = _or_fail(lambda: copy(storage, corpora, Path(settings.spare.folder), work))
    click.echo(f"{done.size / 1e9:.2f} GB were missing and are there now" if done.size else "everything is there")
    identity, now = digest_of(corpora), time.time()
    known = here.state if here.state.holds_for(settings.spare) else SpareState()
    verified_at = now if done.compared else 0.0 if known.damaged else known.verified_at
    staged = SpareState(
        source=settings.spare.source,
        folder=settings.spare.folder,
        digest=identity,
        staged_bytes=sum(corpus.size for corpus in corpora),
        staged_at=now,
        verified_at=verified_at,
    )
    return here.conclude(staged, identity)


@spare.command()
@click.argument("folder", type=click.Path(path_type=Path))
def digest(folder: Path) -> int:
    """Print what spare.digest has to be for the shards in FOLDER: the data of a run, where the run has it."""
    corpora = _or_fail(lambda: read_corpora(Folder(folder)))
    found = sha256_of(corpora)
    _or_fail(lambda: proven(corpora, found))
    click.echo(found)
    return exitcodes.OK


@spare.command()
@option("--rate", type=Finite(min=0, min_open=True), help="MB/s at most. Default: spare.rate_mb_s.")
@click.pass_obj
def verify(settings: Settings, rate: float | None) -> int:
    """Read the staged data again, look at software and preflight, and say whether this node is a ready spare.

    The verdict goes into the agent's metrics and the node's comment in Slurm, and holds for spare.max_age_s. A damaged
    file is removed, so that no run reads it. Exits with 1 if the node is not ready.
    """
    here = Here.of(settings)
    if not settings.spare.source:
        return here.conclude(here.state, "")
    try:
        _, corpora = here.wanted()
        at_source = digest_of(corpora)
    except StorageError as error:
        click.echo(f"opsd: {error}; the data is compared with what was staged", err=True)
        corpora, at_source = _or_fail(lambda: read_corpora(Folder(Path(settings.spare.folder)))), ""
    if digest_of(corpora) != here.state.digest:
        return here.conclude(replace(here.state, damaged=() if at_source else ("its index was changed",)), at_source)
    with shown("reading") as look:
        work = _work(settings, rate, look)
        damaged = _or_fail(lambda: compare(corpora, Path(settings.spare.folder), work))
    return here.conclude(replace(here.state, damaged=tuple(damaged), verified_at=time.time()), at_source)


@spare.command()
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def status(settings: Settings, as_json: bool) -> int:
    """Say whether this node is a ready spare, by its last verdict, without reading any data.

    For batch scripts and launchers: it takes no time. Exits with 1 if the node must not be used as a spare.
    """
    found, node = Here.of(settings).state, settings.agent.node
    why_not = found.why_not_ready(time.time())
    if as_json:
        click.echo(json.dumps({"node": node, "ready": not why_not, "why_not": why_not, "expires_at": found.expires_at}))
        return exitcodes.FAILED if why_not else exitcodes.OK
    if why_not:
        click.echo(f"{node} is not a ready spare: {why_not}")
        return exitcodes.FAILED
    click.echo(f"{node} is a ready spare until {clock(found.expires_at)}")
    return exitcodes.OK


@spare.command()
@option("--delete", is_flag=True, help="Delete the staged files as well.")
@click.pass_obj
def release(settings: Settings, delete: bool) -> int:
    """Make this node an ordinary one again: neither agent nor Slurm have it as a spare."""
    here = Here.of(settings)
    folder = here.state.folder or settings.spare.folder
    if delete and folder:
        freed = _or_fail(lambda: remove(Path(folder)))
        click.echo(f"deleted {freed / 1e9:.2f} GB in {folder}")
    try:
        pool.forget(settings.agent.state_dir)
        pool.mark(choose().slurm, settings.agent.node, "", time.time())
    except OSError as error:
        fail(f"{settings.agent.state_dir}: {error.strerror}")
    except SlurmError as error:
        fail(f"the agent has forgotten it, Slurm has not: {error}")
    click.echo(f"{settings.agent.node} is no spare any more")
    return exitcodes.OK


@spare.command()
@option("--nodes", "count", type=click.IntRange(1), required=True, help="How many Slurm keeps free.")
@option("--partition", default="", help="Take them from this partition.")
@option("--users", default="root", help="Who may use them, separated by commas.")
@click.pass_obj
def reserve(settings: Settings, count: int, partition: str, users: str) -> int:
    """Make the pool's reservation: Slurm chooses the nodes and replaces those that go down."""
    name = settings.spare.reservation
    try:
        pool.reserve(choose().slurm, name, count=count, partition=partition, users=users)
    except SlurmError as error:
        fail(f"Slurm: {error}")
    click.echo(f"reservation {name} keeps {count} nodes free; stage and verify each of them")
    return exitcodes.OK


@spare.command()
@click.pass_obj
def unreserve(settings: Settings) -> int:
    """Delete the pool's reservation; any job can have its nodes again."""
    try:
        choose().slurm.unreserve(settings.spare.reservation)
    except SlurmError as error:
        fail(f"Slurm: {error}")
    click.echo(f"reservation {settings.spare.reservation} is deleted")
    return exitcodes.OK


@dataclass(frozen=True, slots=True)
class Here:
    """This node as a spare: what is known of it, and where a new verdict goes."""

    settings: Settings
    state: SpareState

    @classmethod
    def of(cls, settings: Settings) -> Here:
        """What is known so far."""
        return cls(settings, pool.read(settings.agent.state_dir) or SpareState())

    def wanted(self) -> tuple[Storage, tuple[Corpus, ...]]:
        """The source and what it has. Raises StorageError."""
        spare = self.settings.spare
        if not spare.source or not spare.folder:
            raise click.UsageError("set spare.source and spare.folder: what is staged, and where to")
        if needs_proof(spare.source) and not spare.digest:
            raise click.UsageError(
                f"anybody on the network may answer for {spare.source}: set spare.digest to what `opsd spare digest` "
                "prints where the run has its data, or use https"
            )
        storage = open_storage(spare.source)
        corpora = read_corpora(storage)
        return storage, proven(corpora, spare.digest) if spare.digest else corpora

    def conclude(self, found: SpareState, source_digest: str) -> int:
        """Judge, keep and tell the verdict; the exit code."""
        settings = self.settings
        try:
            found = readiness.assess(settings, found, source_digest, time.time())
        except (HistoryError, ReportError, SelectionError) as error:
            fail(str(error))
        try:
            readiness.publish(settings, found, lambda: choose().slurm)
        except OSError as error:
            fail(f"the verdict was not kept in {settings.agent.state_dir}: {error.strerror}")
        except SlurmError as error:
            click.echo(f"opsd: Slurm was not told: {error}", err=True)
        for topic, why in found.lacks.items():
            click.echo(f"{topic}: {why}")
        until = f"a ready spare until {clock(found.expires_at)}" if found.ready else "not a ready spare"
        click.echo(f"{settings.agent.node} is {until}")
        return exitcodes.OK if found.ready else exitcodes.FAILED


T = TypeVar("T")


def _or_fail(do: Callable[[], T]) -> T:
    try:
        return do()
    except (StageError, StorageError) as error:
        fail(str(error))


def _work(settings: Settings, rate: float | None, look: Look) -> Work:
    wanted = rate or settings.spare.rate_mb_s
    limit = RateLimit(wanted * 1e6 if wanted else None)
    return Work(limit, settings.spare.parallel, lambda progress: look(progress.done, progress.total))
