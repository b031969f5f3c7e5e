"""The collectors of this node, made from the settings."""

from __future__ import annotations

from pathlib import Path

from opsd import rank_page
from opsd.collectors import plugins
from opsd.collectors.base import Collector, Context
from opsd.config import Settings
from opsd.slurm.commands import CommandSlurm
from opsd.slurm.watch import NodeWatch


def build(settings: Settings, state: Path | None = None) -> list[Collector]:
    """The collectors that are enabled. ``state`` is where they may keep what outlives the agent, None for nowhere."""
    context = Context(
        settings,
        settings.agent.node,
        state,
        rank_pages=rank_page,
        slurm_reports=lambda node, period_s: NodeWatch(CommandSlurm(), node, period_s=period_s),
    )
    for plugin in plugins():
        own = settings.section(plugin.settings)
        if own.enabled:
            context.made.append(plugin.make(own, context))
    return context.made
