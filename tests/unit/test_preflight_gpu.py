"""GPU checks on the processor at tiny sizes, and the output of NVIDIA's own tools."""

from __future__ import annotations

import json

import pytest

from opsd.plan.hardware import spec_of
from opsd.preflight.base import Context, CouldNotRunError, Outcome, Verdict
from opsd.preflight.checks import (
    collectives,
    dcgm,
    gpu_burn,
    gpu_host_copy,
    gpu_memory,
    gpu_peer,
    nccl_tests,
    nvbandwidth,
)
from opsd.preflight.judge import judge

torch = pytest.importorskip("torch")

CONTEXT = Context("node-1", "quick", 0.05, device="cpu", nvml_library="/nowhere/libnvidia-ml.so.1")
"""Without a driver, also where another test has loaded a simulated one into this process."""


def run(function, context: Context = CONTEXT) -> tuple[Outcome, list[tuple[float, str]]]:
    progress: list[tuple[float, str]] = []
    return function(context, lambda share, subject: progress.append((share, subject))), progress


def values(outcome: Outcome) -> dict[tuple[str, str], float]:
    return {(m.measure, m.subject): m.value for m in outcome.measurements}


@pytest.mark.parametrize(
    ("check", "function"),
    [
        (gpu_burn.CHECK, gpu_burn.run),
        (gpu_burn.FP8, gpu_burn.run_fp8),
        (gpu_memory.CHECK, gpu_memory.run),
        (gpu_host_copy.CHECK, gpu_host_copy.run),
        (gpu_peer.CHECK, gpu_peer.run),
    ],
)
def test_every_gpu_check_measures_all_that_it_declares(check, function):
    """On the processor, which stands in for one device, healthy hardware passes."""
    outcome, progress = run(function)
    assert judge(check, outcome, 0.0).verdict is Verdict.PASS
    assert all(0 <= share <= 1 for share, _ in progress)


def test_a_product_that_differs_is_counted():
    """A multiplier that flips one element in every product after the first is silent corruption."""
    from opsd.preflight.checks.gpu_burn import burn

    def prepare(device, size):
        calls = []

        def multiply(out):
            calls.append(None)
            out.zero_()
            out[3, 4] = float(len(calls) > 1)

        return multiply

    burned = burn(torch.device("cpu"), prepare, seconds=0.01, size=16, progress=lambda share: None)
    assert burned.mismatches == min(3, burned.products)


def test_a_device_that_fails_is_named_and_the_others_go_on():
    """As when one GPU of eight falls off the bus in the middle of the burn."""
    from opsd.preflight.gpus import on_each

    def work(device):
        if device.index == 1:
            raise RuntimeError("CUDA error: GPU is lost\nCompile with TORCH_USE_CUDA_DSA")
        return device.index

    results, (finding,) = on_each([torch.device("cuda", index) for index in range(3)], work)
    assert results == {"GPU 0": 0, "GPU 2": 2}
    assert finding.verdict is Verdict.FAIL
    assert finding.summary == "GPU 1 stopped computing: CUDA error: GPU is lost"


def test_a_bug_in_a_check_is_not_blamed_on_the_device():
    """Only what torch raises for device errors is."""
    from opsd.preflight.gpus import on_each

    with pytest.raises(ZeroDivisionError):
        on_each([torch.device("cpu")], lambda device: 1 // 0)


@pytest.mark.long
def test_collectives_within_a_node_are_measured():
    """Two processes over gloo; every collective has a bandwidth."""
    outcome, _ = run(collectives.run)
    busbw = {measure for measure, _ in values(outcome) if measure.endswith("_busbw")}
    assert len(busbw) == 6, outcome.findings


def test_data_sheets_are_found_by_the_name_a_gpu_gives_itself():
    """SXM and PCIe differ; what is unknown has none."""
    assert spec_of("NVIDIA H100 80GB HBM3").bf16 == 989.4e12
    assert spec_of("NVIDIA H100 PCIe").bf16 == 756e12
    assert spec_of("NVIDIA GH200 480GB").memory == 4.0e12
    assert spec_of("NVIDIA H200").memory == 4.8e12
    assert spec_of("Quadro P400") is None


NCCL = """
# nThread 1 nGpus 8 minBytes 1024 maxBytes 8589934592 step: 8(factor)
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
        1024           256     float     sum      -1    12.90    0.08    0.14      0    13.10    0.08    0.14      0
node-1:880:880 [0] NCCL INFO comm 0x55ba rank 0 nranks 8
  8589934592    2147483648     float     sum      -1    31300   274.4   480.2      0    31280   274.6   480.5    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 240.1
"""


def test_the_table_of_nccl_tests_is_read_in_base_units():
    """The better half of each row, lines of NCCL between them notwithstanding."""
    small, large = nccl_tests.parse(NCCL)
    assert (small.size, small.seconds, small.busbw) == (1024, pytest.approx(12.9e-6), pytest.approx(0.14e9))
    assert (large.size, large.busbw, large.wrong) == (8 << 30, pytest.approx(480.5e9), 0)
    assert values(nccl_tests.outcome([small, large]))["busbw", "8.59 GB"] == pytest.approx(480.5e9)


def test_wrong_elements_fail_the_check():
    """nccl-tests itself has exited 0 with them."""
    rows = nccl_tests.parse(NCCL.replace("480.2      0", "480.2      7"))
    assert judge(nccl_tests.CHECK, nccl_tests.outcome(rows), 0.0).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    "text", ["", NCCL.partition("# Out")[0], "Test NCCL failure common.cu:1 'unhandled system error'"]
)
def test_a_run_of_nccl_tests_that_broke_off_could_not_run(text: str):
    """A table without its end is no result."""
    with pytest.raises(CouldNotRunError, match="did not finish"):
        nccl_tests.parse(text)


def nvbandwidth_answer(**changes) -> str:
    case = {
        "name": "device_to_device_memcpy_read_ce",
        "status": "Passed",
        "bandwidth_description": "memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)",
        "bandwidth_matrix": [["N/A", "394.20"], ["393.90", "N/A"]],
    }
    return json.dumps({"nvbandwidth": {"version": "v0.8", "testcases": [{**case, **changes}]}})


def test_the_matrices_of_nvbandwidth_are_read_pair_by_pair():
    """Numbers are texts there, and a GPU does not copy to itself."""
    found = nvbandwidth.parse(nvbandwidth_answer())
    assert values(nvbandwidth.outcome(found)) == {("between", "0 to 1"): 394.2e9, ("between", "1 to 0"): 393.9e9}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "CUDA_ERROR_NO_DEVICE",
        nvbandwidth_answer(status="Error"),
        nvbandwidth_answer(bandwidth_matrix=[["N/A"]]),
        json.dumps({"nvbandwidth": {"error": "no device"}}),
    ],
)
def test_nvbandwidth_without_numbers_could_not_run(text: str):
    """Nothing measured is nothing known."""
    with pytest.raises(CouldNotRunError, match="nvbandwidth"):
        nvbandwidth.parse(text)


def dcgm_answer(*results: dict, name: str = "memory", key: str = "DCGM Diagnostic") -> str:
    category = {"category": "Hardware", "tests": [None, {"name": name, "results": [*results]}]}
    return "a warning before it\n" + json.dumps({key: {"test_categories": [category]}})


def test_dcgms_answer_is_read_in_its_old_and_its_new_form():
    """A failed GPU with a text (DCGM 3) and with objects (DCGM 4); passes and skips say nothing."""
    old = dcgm_answer({"gpu_ids": "3", "status": "FAIL", "warnings": "bad page"}, key="DCGM GPU Diagnostic")
    new = dcgm_answer(
        {"entity_group": "GPU", "entity_id": 3, "status": "Fail", "warnings": [{"warning": "bad page", "error_id": 1}]},
        {"entity_id": 4, "status": "Pass"},
        {"entity_id": 5, "status": "Skip"},
    )
    for text in (old, new):
        (finding,) = dcgm.parse(text).findings
        assert (finding.verdict, finding.summary) == (Verdict.FAIL, "GPU 3: DCGM's memory says bad page")
    assert values(dcgm.parse(new))["tests", ""] == 2


def test_a_status_of_dcgm_that_nobody_knows_is_not_a_pass():
    """A new word in a new release must not turn a node green."""
    (finding,) = dcgm.parse(dcgm_answer({"entity_id": 0, "status": "Inconclusive"})).findings
    assert finding.verdict is Verdict.COULD_NOT_RUN


def test_when_dcgm_skips_everything_the_check_fails():
    """Nothing was looked at."""
    outcome = dcgm.parse(dcgm_answer({"entity_id": 0, "status": "Skip"}))
    assert judge(dcgm.CHECK, outcome, 0.0).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Error: unable to establish a connection to the specified host: localhost",
        dcgm_answer(),
        json.dumps({"DCGM Diagnostic": {"runtime_error": "no GPUs"}}),
    ],
)
def test_dcgm_without_a_result_could_not_run(text: str):
    """Its daemon may not be running."""
    with pytest.raises(CouldNotRunError, match="dcgmi"):
        dcgm.parse(text)
