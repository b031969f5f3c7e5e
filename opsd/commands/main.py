"""The ``opsd`` command: a list of subcommands, each loaded only when it is called."""

from __future__ import annotations

import sys
import traceback
from importlib import import_module

import click

from opsd import __version__, exitcodes

COMMANDS = {
    "agent": ("opsd.commands.agent:agent", "Run the node agent: collect, judge, act, serve metrics."),
    "alerts": ("opsd.commands.alerts:alerts", "Build Prometheus' rules, or check that they are current."),
    "bench": ("opsd.commands.bench:bench", "Measure opsd beside its peers."),
    "chaos": ("opsd.commands.chaos:chaos", "Cause a fault on purpose on this node, bounded in time, and undo it."),
    "checkpoint": ("opsd.commands.checkpoint:checkpoint", "List, verify, audit, prune and upload checkpoints."),
    "completion": ("opsd.commands.completion:completion", "Print the completion script for your shell."),
    "config": ("opsd.commands.config:config", "Check, show or create the configuration file."),
    "dashboards": (
        "opsd.commands.dashboards:dashboards",
        "Build the Grafana boards, check that they are current, push them.",
    ),
    "deploy": ("opsd.commands.deploy:deploy", "List, show or copy systemd units, batch scripts, rules, Ansible."),
    "demo": ("opsd.commands.demo:demo", "Train a small model, break it six ways, watch it recover."),
    "diagnose": (
        "opsd.commands.diagnose:command",
        "Why a run stands still or trains slowly: data, network or kernels.",
    ),
    "docs": ("opsd.commands.docs:docs", "Write the reference pages, or check that they are current."),
    "drain": ("opsd.commands.drain:drain", "Let nodes finish their jobs and take no new ones."),
    "incidents": ("opsd.commands.incidents:incidents", "List the incidents of this node, show one, sum them up."),
    "launch": ("opsd.commands.launch:launch", "Start and supervise the ranks of a job, where torchrun is used today."),
    "ledger": ("opsd.commands.ledger:ledger", "Where the wall-clock time of a run went."),
    "metrics": ("opsd.commands.metrics:metrics", "List every metric that the agent exports."),
    "preflight": ("opsd.commands.preflight:preflight", "Check that this node is fit for a run."),
    "return": (
        "opsd.commands.drain:give_back",
        "Give nodes that were drained back to Slurm, once they are proved good.",
    ),
    "requeue": ("opsd.commands.requeue:requeue", "Put a job back into the queue, to start at once elsewhere."),
    "runbook": ("opsd.commands.runbook:runbook", "List the runbooks or show one."),
    "slurm": ("opsd.commands.slurm:slurm", "A run as a Slurm job; what opsd may do with Slurm here."),
    "spare": ("opsd.commands.spare:spare", "Spares: list the pool, stage data, verify, release."),
    "stack": ("opsd.commands.stack:stack", "Show the whole monitoring stack on this machine, and an alert."),
    "status": ("opsd.commands.status:status", "What the agent of this node sees right now."),
    "swap": ("opsd.commands.swap:swap", "Let a spare take the place of a node of a run."),
    "targets": ("opsd.commands.targets:targets", "List the agents of all nodes for Prometheus, from Slurm."),
    "top": ("opsd.commands.top:top", "Watch the GPUs, ranks and incidents of this node live."),
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show the list without importing the commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in sorted(COMMANDS)])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="opsd")
def cli() -> None:
    """Keep a training run on a GPU cluster at full speed."""


def main() -> None:
    """Entry point of the ``opsd`` script."""
    try:
        code = cli.main(standalone_mode=False, prog_name="opsd")
    except click.ClickException as error:
        error.show()
        sys.exit(exitcodes.USAGE)
    except click.Abort:
        click.echo("opsd: interrupted", err=True)
        sys.exit(exitcodes.INTERRUPTED)
    except Exception:  # 1, as Python has it, would be the answer no: a prolog drains the node for it
        traceback.print_exc()
        sys.exit(exitcodes.BROKEN)
    sys.exit(code if isinstance(code, int) else exitcodes.OK)
