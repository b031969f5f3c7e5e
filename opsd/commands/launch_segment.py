"""The nodes that one tensor and expert parallel group of the included trainer takes, from its configuration."""

from __future__ import annotations

import argparse

from opsd.commands.launch_plan import TRAINER
from opsd.launch.ranks.settings import Program


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
