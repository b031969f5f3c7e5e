"""What the command line lists: metrics and runbooks, complete and consistent."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from opsd import exitcodes
from opsd.agent import metrics as own
from opsd.agent.collectors import build
from opsd.collectors import plugins
from opsd.commands.main import cli
from opsd.commands.metrics import catalogue, label_values
from opsd.config import Settings
from opsd.runbooks import RUNBOOKS
from opsd.runbooks.lib.guides import guides

DOCS = Path(__file__).parents[2] / "docs"
_BASE_UNITS = {
    "",
    "seconds",
    "bytes",
    "celsius",
    "watts",
    "ratio",
    "hertz",
    "bytes_per_second",
    "joules",
    "volts",
    "amperes",
    "meters",
}


DCGM_EXPORTER_DEFAULTS = {
    "DCGM_FI_DEV_SM_CLOCK": "gauge",
    "DCGM_FI_DEV_MEM_CLOCK": "gauge",
    "DCGM_FI_DEV_MEMORY_TEMP": "gauge",
    "DCGM_FI_DEV_GPU_TEMP": "gauge",
    "DCGM_FI_DEV_POWER_USAGE": "gauge",
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "counter",
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": "counter",
    "DCGM_FI_DEV_GPU_UTIL": "gauge",
    "DCGM_FI_DEV_MEM_COPY_UTIL": "gauge",
    "DCGM_FI_DEV_ENC_UTIL": "gauge",
    "DCGM_FI_DEV_DEC_UTIL": "gauge",
    "DCGM_FI_DEV_XID_ERRORS": "gauge",
    "DCGM_FI_DEV_FB_FREE": "gauge",
    "DCGM_FI_DEV_FB_USED": "gauge",
    "DCGM_FI_DEV_FB_RESERVED": "gauge",
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": "counter",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": "counter",
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": "counter",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "gauge",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "gauge",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "gauge",
    "DCGM_FI_PROF_DRAM_ACTIVE": "gauge",
    "DCGM_FI_PROF_PCIE_TX_BYTES": "gauge",
    "DCGM_FI_PROF_PCIE_RX_BYTES": "gauge",
}
"""What of default-counters.csv in NVIDIA/dcgm-exporter 4.4 a bare-metal GPU's NVML can tell."""


@pytest.mark.parametrize("metric", [metric for _, metric in catalogue()], ids=lambda metric: metric.name)
def test_a_metric_follows_the_naming_rules(metric) -> None:
    """Help, base unit at the end of the name, _total for counters and _info for infos, valid labels."""
    assert metric.help.endswith(".")
    assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", metric.name)
    assert len(set(metric.labels)) == len(metric.labels)
    assert all(re.fullmatch(r"[a-zA-Z][a-zA-Z0-9_]*", label) for label in metric.labels)
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert (metric.kind == "info") == metric.name.endswith("_info")
    assert metric.unit in _BASE_UNITS
    if metric.unit and metric.name.startswith("opsd_"):
        assert metric.name.removesuffix("_total").endswith("_" + metric.unit)


def test_dcgm_exporters_defaults_are_all_there() -> None:
    """Dashboards and alerts written for dcgm-exporter find its names, its labels and a type that fits."""
    ours = {metric.name: metric for _, metric in catalogue()}
    for name, kind in DCGM_EXPORTER_DEFAULTS.items():
        assert ours[name].kind == {"gauge": "gauge", "counter": "untyped"}[kind], name
        assert ours[name].labels == ("gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname", "hostname"), name


def test_no_name_is_used_twice() -> None:
    """Each metric has one source."""
    names = [metric.name for _, metric in catalogue()]
    assert sorted(set(names)) == sorted(names)


def test_the_list_of_metrics_has_every_column() -> None:
    """For people one line each, for scripts JSON with the same content."""
    rows = json.loads(CliRunner().invoke(cli, ["metrics", "--json"]).output)
    assert {row["name"] for row in rows} == {metric.name for _, metric in catalogue()}
    assert all(set(row) == {"name", "type", "labels", "unit", "help", "source"} for row in rows)
    listed = CliRunner().invoke(cli, ["metrics", "--list"]).output
    assert all(
        any(line.startswith(row["name"]) and row["help"] in line for line in listed.splitlines()) for row in rows
    )


def test_the_values_of_every_label_are_documented() -> None:
    """What bounds the number of series, and nothing about labels that are gone."""
    sources = [(own.METRICS, own.LABELS)]
    sources += [(made.metrics, plugin.labels) for made, plugin in zip(build(Settings()), plugins(), strict=True)]
    for metrics, labels in sources:
        assert set(labels) == {label for metric in metrics for label in metric.labels}
    listed = CliRunner().invoke(cli, ["metrics", "--list"]).output
    assert all(f"{label} " in listed and values in listed for label, values in label_values().items())


@pytest.mark.parametrize("book", RUNBOOKS, ids=lambda book: book.kind)
def test_a_runbook_can_be_read(book) -> None:
    """The list names it, and its page says the same as its file."""
    assert book.kind in CliRunner().invoke(cli, ["runbook", "list"]).output
    shown = CliRunner().invoke(cli, ["runbook", "show", book.kind, "--markdown"])
    assert shown.exit_code == exitcodes.OK
    assert shown.output == (DOCS / f"runbooks/{book.kind}.md").read_text(encoding="utf-8")
    assert guides()[book.kind].title in CliRunner().invoke(cli, ["runbook", "show", book.kind]).output


def test_a_runbook_that_does_not_exist_names_the_nearest() -> None:
    """A slip of the finger is one sentence."""
    assert "did you mean rank_crash?" in CliRunner().invoke(cli, ["runbook", "show", "rank_crahs"]).output
