"""``opsd simulate`` on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from opsd import exitcodes
from opsd.commands.main import cli

RUN = ("simulate", "--nodes", "12", "--spares", "3", "--days", "20", "--draws", "3")


def simulated(*more: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, [*RUN, *more, "--json", "-"], catch_exceptions=False)
    assert result.exit_code == exitcodes.OK, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_the_result_as_json() -> None:
    """The buckets sum to the wall clock, and the interval holds the mean."""
    answer = simulated("--advise")
    wanted = {
        "ettr", "ettr_low", "ettr_high", "wall_s", "buckets", "outages_per_1000_node_days", "spares_in_use_p50",
        "spares_in_use_p99", "swaps", "requeues", "elapsed_s", "spares_needed",
    }  # fmt: skip
    assert wanted <= answer.keys()
    assert sum(answer["buckets"].values()) == pytest.approx(answer["wall_s"])
    assert answer["wall_s"] == 20 * 86_400
    assert answer["ettr_low"] <= answer["ettr"] <= answer["ettr_high"]


def test_ten_thousand_nodes_fit_into_two_gib() -> None:
    """Of address space, which is more than what is used of it."""
    command = [sys.executable, "-m", "opsd", "simulate", "--nodes", "9400", "--spares", "600", "--days", "1"]
    limited = ["sh", "-c", f'ulimit -v {2 << 20}; exec "$@"', "sh", *command, "--draws", "1", "--json", "-"]
    done = subprocess.run(limited, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == exitcodes.OK, done.stderr
    assert json.loads(done.stdout)["wall_s"] == 86_400


def test_policies_and_spares_beside_each_other(tmp_path: Path) -> None:
    """With the same outages each; a sweep is drawn as well."""
    policies = simulated("--compare")["policies"]
    assert [each["policy"] for each in policies] == ["torchrun", "requeue", "hot", "pool", "shrink"]
    assert len({each["outages_per_1000_node_days"] for each in policies}) == 1
    assert (policies[0]["gain"], policies[3]["gain_low"] <= policies[3]["gain"]) == (0, True)
    assert policies[3]["gain"] == pytest.approx(policies[3]["ettr"] - policies[0]["ettr"])
    bars = tmp_path / "policies.svg"
    simulated("--compare", "--chart", str(bars))
    assert bars.read_text().count("<rect") == 6 * (5 + 1)
    chart = tmp_path / "spares.svg"
    answer = simulated("--sweep", "spares=0..3", "--chart", str(chart))
    assert [each["spares"] for each in answer["sweep"]] == [0, 1, 2, 3]
    assert answer["knee"] in range(4)
    assert chart.read_text().startswith("<svg")


@pytest.mark.parametrize("more", [(), ("--compare",), ("--sweep", "spares=0..2")])
def test_the_result_for_people(more: tuple[str, ...]) -> None:
    """Says where its times are from."""
    result = CliRunner().invoke(cli, [*RUN, *more], catch_exceptions=False)
    assert "ETTR" in result.stdout
    assert "docs/benchmarks.md" in result.stdout


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--compare", "--sweep", "spares=0..1"), "exclude each other"),
        (("--sweep", "spares=4..1"), "should be spares=FIRST..LAST"),
        (("--chart", "x.svg"), "--chart needs --sweep or --compare"),
        (("--rates", "/nowhere.toml"), "the built-in rates are stepfun"),
        (("--trace", "/nowhere.json"), "cannot be read"),
        (("--trace-nodes", "4"), "--trace-nodes needs --trace"),
        (("--trace", "/dev/zero"), "is a device"),
        (("--trace", "/dev/null", "--rates", "rsc1"), "exclude each other"),
        (("--rates", "/dev/zero"), "not a regular file"),
        (("--interval-s", "1e308"), "not in the range"),
        (("--least", "13"), "more than --nodes 12"),
        (("--inside", "4"), "more than --spares 3"),
        (("--topology", "/dev/zero"), "/dev/zero cannot be read: not a regular file"),
        (("--topology", "/dev/null"), "has no nodes below a switch"),
        (("--topology", "/dev/null", "--per-switch", "4"), "exclude each other"),
    ],
)
def test_bad_input_is_one_sentence(more: tuple[str, ...], told: str) -> None:
    """And nothing is played."""
    result = CliRunner().invoke(cli, [*RUN, *more])
    assert (result.exit_code, told in result.output) == (exitcodes.USAGE, True), result.output
