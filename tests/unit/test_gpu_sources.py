"""DCGM beside the driver: what counts, what it is called, and where the two disagree."""

from __future__ import annotations

from opsd.collectors.base import GpuFact, Metric, Reading, Sample
from opsd.collectors.dcgm import DIFFER_S, Comparison
from opsd.collectors.lib.nvml.series import GPU_TEMP, REMAP_FAILURE, SM_CLOCK, Identity

NODE = "n1"
GPUS = tuple(GpuFact(index, f"GPU-{index}", f"0000:0{index}:00.0", "H100") for index in range(2))
UP = Metric("opsd_dcgm_exporter_up", "x")


def own(metric: Metric, gpu: GpuFact, value: float) -> Sample:
    """The driver's sample."""
    return Sample(metric, value, Identity(gpu.index, gpu.uuid, gpu.pci_bus_id, gpu.model).labels(metric, NODE))


def told(metric: Metric, uuid: str, value: float, index: int = 0) -> Sample:
    """DCGM's, by labels of its own."""
    return Sample(metric, value, (str(index), uuid, "1B", "x", "NVIDIA H100", "box", "box"))


def test_the_drivers_value_counts_and_the_rest_is_added_by_its_labels() -> None:
    """Of each GPU by itself: one that the driver says nothing of hides nothing of the other."""
    driver = Reading((own(GPU_TEMP, GPUS[0], 60.0),), facts=GPUS)
    samples = [
        Sample(UP, 1.0),
        told(GPU_TEMP, "GPU-0", 99.0),
        told(GPU_TEMP, "GPU-1", 55.0, 1),
        told(SM_CLOCK, "GPU-0", 9),
    ]
    kept, wrong = Comparison((), NODE).merge(samples, driver, 0.0)
    assert kept == [Sample(UP, 1.0), own(GPU_TEMP, GPUS[1], 55.0), own(SM_CLOCK, GPUS[0], 9.0)]
    assert wrong == ()


def test_without_a_driver_dcgm_speaks_alone() -> None:
    """Its samples are as they came."""
    samples = [told(GPU_TEMP, "GPU-7", 99.0)]
    assert Comparison((), NODE).merge(samples, Reading(), 0.0) == (samples, ())


def test_a_gpu_that_the_driver_does_not_know_is_left_out_and_named() -> None:
    """So is one of another index, whose values are kept by the driver's."""
    samples = [told(GPU_TEMP, "GPU-7", 99.0), told(GPU_TEMP, "GPU-1", 55.0, 5)]
    kept, wrong = Comparison((), NODE).merge(samples, Reading(facts=GPUS), 0.0)
    assert kept == [own(GPU_TEMP, GPUS[1], 55.0)]
    assert wrong == ("GPU-7, which the driver does not know", "the index of GPU-1")


def test_values_that_hardly_change_must_agree_within_minutes() -> None:
    """What one source is late with is no difference; nor is one that ends in between."""
    comparison = Comparison({REMAP_FAILURE.name}, NODE)
    driver = Reading((own(REMAP_FAILURE, GPUS[0], 0.0), own(GPU_TEMP, GPUS[0], 60.0)), facts=GPUS)
    says = {value: [told(REMAP_FAILURE, "GPU-0", value), told(GPU_TEMP, "GPU-0", 99.0)] for value in (0.0, 1.0)}

    def wrong(value: float, now: float) -> tuple[str, ...]:
        return comparison.merge(says[value], driver, now)[1]

    assert wrong(1.0, 0.0) == wrong(1.0, DIFFER_S - 1) == wrong(0.0, DIFFER_S) == wrong(1.0, DIFFER_S + 1) == ()
    assert wrong(1.0, 2 * DIFFER_S + 1) == ("DCGM_FI_DEV_ROW_REMAP_FAILURE of GPU-0",)
