"""Many nodes side by side: majorities and medians."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.preflight.checks import gpu_inventory
from opsd.preflight.fleet import Fleet, FleetError, deviations, facts_of, fleet_of
from tests.fakes.preflight_reports import GEMM, VERSIONS, report


def node(name: str, at: float = 1000.0, **facts: str):
    return report(replace(VERSIONS, facts=facts), GEMM, node=name, started=at)


def test_the_nodes_that_differ_are_named_beside_the_majority():
    """One node with another kernel, one without NCCL."""
    reports = [node(f"n{i}", kernel="6.8", NCCL="2.27") for i in range(6)]
    reports += [node("n6", kernel="6.5", NCCL="2.27"), node("n7", kernel="6.8")]
    assert [str(deviation) for deviation in deviations(facts_of(reports))] == [
        "NCCL is absent on n7; 7 of 8 nodes have 2.27",
        "kernel is 6.5 on n6; 7 of 8 nodes have 6.8",
    ]


def test_gpus_that_are_wired_otherwise_than_elsewhere_are_named():
    """Their layout is compared; UUIDs and NVLink domains differ by nature and are not."""

    def gpus(name: str, links: str):
        facts = {"NVLinks of the GPUs": links, "GPU 0": f"NVIDIA H100 GPU-{name} at 0000:1b:00.0"}
        facts[gpu_inventory.DOMAIN] = f"5e797fc6-0f46-421a-8724-0e102c0f723c.{ord(name)}"
        return report(replace(VERSIONS, check="gpu_inventory", facts=facts), node=name)

    found = deviations(facts_of([gpus("a", "18 18"), gpus("b", "18 18"), gpus("c", "18 12")]))
    assert [str(deviation) for deviation in found] == ["NVLinks of the GPUs is 18 12 on c; 2 of 3 nodes have 18 18"]


def test_only_the_newest_report_of_a_node_counts():
    """A node that was repaired is not held to its old report."""
    reports = [node("a", 2.0, kernel="6.8"), node("a", 1.0, kernel="6.5"), node("b", kernel="6.8")]
    assert deviations(facts_of(reports)) == []


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.sampled_from(["6.8", "6.5", "6.1"]), min_size=1))
def test_the_majority_is_never_smaller_than_what_deviates(kernels: dict[str, str]):
    """Whatever the distribution and order, each deviating group is at most as large as the majority, and all add up."""
    found = deviations({name: {"kernel": kernel} for name, kernel in kernels.items()})
    reverse = deviations({name: {"kernel": kernel} for name, kernel in reversed(kernels.items())})
    assert found == reverse
    assert all(len(deviation.nodes) <= deviation.majority_count for deviation in found)
    if found:
        assert sum(len(deviation.nodes) for deviation in found) + found[0].majority_count == len(kernels)


def test_medians_go_to_a_file_and_back(tmp_path: Path):
    """What `opsd preflight merge --fleet` writes is what preflight.fleet reads."""
    fleet = fleet_of([node("a"), node("b")])
    assert fleet.medians("gpu_burn") == {"throughput": 635e12}
    path = tmp_path / "fleet.json"
    path.write_text(fleet.to_json(), encoding="utf-8")
    assert Fleet.read(path) == fleet


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_fleet_file_that_cannot_be_used_is_refused_with_a_sentence(tmp_path: Path, content: str | None):
    """Missing or foreign: the sentence names the command that writes one."""
    path = tmp_path / "fleet.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(FleetError, match="opsd preflight merge"):
        Fleet.read(path)
