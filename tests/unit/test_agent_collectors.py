"""Which collectors the agent has, and what they tell each other."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from opsd import client, config
from opsd.agent import collectors
from opsd.collectors import plugins
from opsd.collectors.base import Reading
from opsd.collectors.ranks import RanksCollector

SECTIONS = [plugin.name for plugin in plugins()]


def names(settings: config.Settings) -> list[str]:
    return [collector.name for collector in collectors.build(settings)]


def test_each_collector_has_a_section_of_its_name() -> None:
    """What is said of a collector can be looked up in the configuration."""
    assert names(config.Settings()) == SECTIONS
    assert len(set(SECTIONS)) == len(SECTIONS)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_collector_can_be_switched_off(tmp_path: Path, section: str) -> None:
    """It alone."""
    file = tmp_path / "opsd.toml"
    file.write_text(f"[{section}]\nenabled = false\n")
    assert names(config.load(file, env={})) == [name for name in SECTIONS if name != section]


def test_dear_sources_are_asked_as_seldom_as_configured() -> None:
    """The settings reach the collectors."""
    wanted = {"nvme": 300.0, "storage_net": 30.0, "infiniband": 4.0}
    settings = config.load(None, [f"{name}.interval_s={seconds:g}" for name, seconds in wanted.items()], env={})
    found = {one.name: getattr(one, "interval_s", 0.0) for one in collectors.build(settings)}
    assert {name: found[name] for name in wanted} == wanted


def test_the_mounts_of_runs_are_watched(tmp_path: Path) -> None:
    """Where a run writes matters, whatever the type of its file system is."""
    run = {
        "job": "1", "node": "n", "state": "running", "generation": 1, "launcher_pid": os.getpid(),
        "launcher_start": client.process_start(os.getpid()), "world_size": 1, "control": "", "folder": "/proc/run",
    }  # fmt: skip
    (tmp_path / "train").mkdir()
    (tmp_path / "train/run.json").write_text(json.dumps(run))
    built = {one.name: one for one in collectors.build(config.load(None, [f"ranks.root={tmp_path}"], env={}))}

    def mounts() -> set[str]:
        reading = built["storage"].collect()
        assert isinstance(reading, Reading)
        return {sample.labels[0] for sample in reading.samples if sample.metric.name == "opsd_storage_mount_info"}

    before = mounts()
    ranks = built["ranks"]
    assert isinstance(ranks, RanksCollector)
    ranks.collect()
    assert ranks.folders == ("/proc/run",)
    assert mounts() - before == {"/proc"}
