"""The ``opsd`` command: a list of subcommands, each loaded only when it is called."""

from __future__ import annotations

from opsd.commands.interrupts import ended_at_once

with ended_at_once():
    import difflib
    import errno
    import gc
    import io
    import os
    import select
    import sys
    import traceback
    from importlib import import_module
    from importlib.util import find_spec

    import click

    from opsd import __version__, exitcodes

COMMANDS = {
    "ablate": "Experiments beside a main run: arms, seeds, verdicts, cost.",
    "agent": "Run the node agent: collect, judge, act, serve metrics.",
    "alerts": "Build Prometheus' rules, or check that they are current.",
    "audit": "Whether the batches of a post-training are what their rows say.",
    "bench": "Measure opsd beside its peers.",
    "chaos": "Cause a fault on purpose on this node, bounded in time, and undo it.",
    "chat": "Talk to a checkpoint, or to two.",
    "checkpoint": "List, verify, audit, prune and upload checkpoints.",
    "compare": "Two runs beside each other: losses, speed, restarts, cost.",
    "completion": "Print the completion script for your shell.",
    "config": "Check, show, create or reload the configuration.",
    "dashboards": "Build the Grafana boards, check that they are current, push them.",
    "data": "Run datatrove pipelines: nothing skipped, nothing twice.",
    "demo": "Train a small model, break it six ways, watch it recover.",
    "deploy": "List, show or copy systemd units, batch scripts, rules, Ansible.",
    "diagnose": "Why a run stands still or trains slowly: data, network or kernels.",
    "drain": "Let nodes finish their jobs and take no new ones.",
    "evidence": "One archive with what is known of a node's hardware, for its vendor.",
    "incidents": "List the incidents of this node, show one, sum them up.",
    "launch": "Start and supervise the ranks of a job, where torchrun is used today.",
    "ledger": "Where the wall-clock time of a run went.",
    "metrics": "List every metric that the agent exports.",
    "nodes": "Nodes that fail again and again; which to take for a run.",
    "plan": "What a run takes before it starts: layout, days, GPUs, cost.",
    "preflight": "Check that this node is fit for a run.",
    "repair": "Repair a node that was drained, test it under load, and return it.",
    "report": "What became of a run: steps, restarts, cost, as a page or as text.",
    "requeue": "Put a job back into the queue, to start at once elsewhere.",
    "runbook": "List the runbooks or show one.",
    "simulate": "What failures will cost a run: its own decisions, played on faults in virtual time.",
    "slurm": "A run as a Slurm job; what opsd may do with Slurm here.",
    "spare": "Spares: list the pool, stage data, verify, release.",
    "stack": "Show the whole monitoring stack on this machine, and an alert.",
    "status": "What the agent of this node sees right now.",
    "swap": "Let a spare take the place of a node of a run.",
    "targets": "List the agents of all nodes for Prometheus, from Slurm.",
    "top": "Watch the GPUs, ranks and incidents of this node live.",
    "train": "Train a model on this node: the trainer under the launcher.",
    "vibe": "Whether checkpoints follow their system prompt, stop, repeat.",
    "undrain": "Give nodes that were drained back to Slurm, once they are proved good.",
}
"""The purpose of each command. NAME is the function of that name in ``opsd/commands/NAME.py``."""

FORMER = {"return": "undrain"}
"""Earlier names of commands, which go on working."""

GROUPS = {
    "Plan": ("data", "plan", "simulate", "ablate"),
    "Run": ("launch", "train", "slurm", "swap", "requeue", "checkpoint"),
    "See what is going on": ("status", "top", "incidents", "diagnose", "runbook", "report", "compare", "ledger"),
    "Post-train": ("audit", "chat", "vibe"),
    "Nodes": ("agent", "preflight", "drain", "repair", "undrain", "evidence", "spare", "nodes", "config"),
    "Set up": ("deploy", "alerts", "dashboards", "targets", "metrics", "completion"),
    "Try and test": ("demo", "chaos", "stack", "bench"),
}
"""The headings of the list of commands."""

CHECKOUT_ONLY = frozenset({"bench", "stack"})
"""Commands for the development of opsd: packages do not have them."""


def _commands() -> list[str]:
    """The commands that are here."""
    return sorted(
        name for name in COMMANDS if name not in CHECKOUT_ONLY or find_spec(f"opsd.commands.{name}") is not None
    )


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return _commands()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = FORMER.get(cmd_name, cmd_name)
        if cmd_name not in COMMANDS:
            if ctx.resilient_parsing:  # of what is being completed
                return None
            near = difflib.get_close_matches(cmd_name, _commands(), n=1)
            hint = f"did you mean `opsd {near[0]}`?" if near else "`opsd --help` lists the commands"
            raise click.UsageError(f"there is no command {cmd_name!r}; {hint}", ctx)
        if cmd_name not in _commands():
            raise click.UsageError(f"`opsd {cmd_name}` is for the development of opsd: run it in a checkout")
        with ended_at_once():
            command = getattr(import_module(f"opsd.commands.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show the list without importing the commands."""
        here = _commands()
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<10}", COMMANDS[name]) for name in names if name in here])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="opsd")
def cli() -> None:
    """Keep a training run on a GPU cluster at full speed.

    `opsd COMMAND --help` explains each command and its exit codes.
    """


def nobody_reads() -> bool:
    """Whether stdout is a pipe that its reader has closed, as `head -1` does."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def show(error: click.ClickException) -> None:
    """Say on stderr what click would say, with the prefix of all other messages."""
    message = error.format_message()
    if isinstance(error, click.UsageError) and error.ctx is not None:
        if message == error.ctx.get_help():  # a group without a command
            click.echo(message, err=True)
            return
        help_option = error.ctx.command.get_help_option(error.ctx)
        hint = f"Try '{error.ctx.command_path} {help_option.opts[-1]}' for help.\n" if help_option is not None else ""
        click.echo(f"{error.ctx.get_usage()}\n{hint}", err=True)
    click.echo(f"opsd: {message}", err=True)


def open_closed_streams() -> None:
    """Give the standard streams that the caller has closed a descriptor: the next file would get their number.

    What is written to such a stdout fails, as it should: nobody would see it.
    """
    modes = ((os.O_RDONLY, "r"), (os.O_RDONLY, "w"), (os.O_WRONLY, "w"))
    for number, (name, (flags, mode)) in enumerate(zip(("stdin", "stdout", "stderr"), modes, strict=True)):
        if getattr(sys, name) is None:
            os.set_inheritable(os.open(os.devnull, flags), True)  # the lowest free number, which is this one
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def unwritten(error: OSError, was_closed: bool) -> str:
    """What helps if the output could not be written, "" for other errors. ``was_closed``: stdout, by the caller."""
    if was_closed and error.errno == errno.EBADF:
        return "open stdout"
    return "free some, or send the output elsewhere" if exitcodes.of_error(error) == exitcodes.NO_SPACE else ""


def main() -> None:
    """Entry point of the ``opsd`` script."""
    was_closed = sys.stdout is None
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without a character for a dash shows "?"
    try:
        code = cli.main(standalone_mode=False, prog_name="opsd")
        sys.stdout.flush()
    except click.ClickException as error:
        show(error)
        sys.exit(exitcodes.USAGE)
    except (SystemExit, BrokenPipeError):  # click ends with 1 when it cannot write, which is the answer no elsewhere
        if not nobody_reads():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 1)  # the interpreter's own end would write again
        sys.exit(exitcodes.UNREAD)
    except click.Abort:
        click.echo("opsd: interrupted", err=True)
        sys.exit(exitcodes.INTERRUPTED)
    except Exception as error:  # 1, as Python has it, would be the answer no: a prolog drains the node for it
        if isinstance(error, OSError) and (remedy := unwritten(error, was_closed)):
            where = f"{error.filename}: " if error.filename else ""
            click.echo(f"opsd: {where}{error.strerror}: {remedy}", err=True)
            os._exit(exitcodes.NO_SPACE)  # the interpreter's own end would try to write again
        traceback.print_exc()
        sys.exit(exitcodes.BROKEN)
    finally:
        gc.freeze()  # else the interpreter's last collection takes 0.2 to 0.4 s, three times in a row for a Slurm job
    sys.exit(code if isinstance(code, int) else exitcodes.OK)
