"""Conventions that every series of the collectors keeps, and dcgm-exporter's names."""

from __future__ import annotations

import pytest

from opsd.commands.metrics import catalogue

METRICS = tuple(metric for source, metric in catalogue() if source != "agent")
UNITS = {"", "seconds", "bytes", "bytes_per_second", "celsius", "watts", "hertz", "ratio"}

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


def test_dcgm_exporters_defaults_are_all_there() -> None:
    """Dashboards and alerts written for dcgm-exporter find its names, its labels and a type that fits."""
    ours = {metric.name: metric for metric in METRICS}
    for name, kind in DCGM_EXPORTER_DEFAULTS.items():
        assert ours[name].kind == {"gauge": "gauge", "counter": "untyped"}[kind], name
        assert ours[name].labels == ("gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname"), name


def test_names_are_unique() -> None:
    """One family has one definition."""
    assert len({metric.name for metric in METRICS}) == len(METRICS)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_follows_the_conventions(metric) -> None:
    """Help is a sentence, the unit is a base unit and part of the name, counters end in _total."""
    assert metric.help.endswith(".")
    assert metric.unit in UNITS
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    if metric.unit:
        assert metric.name.removesuffix("_total").endswith(f"_{metric.unit}")
    assert (metric.kind == "info") == metric.name.endswith("_info")
