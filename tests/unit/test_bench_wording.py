"""The comparison with other monitors finds their patterns and lines, and each silence has a reason."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from opsd.bench import BenchError
from opsd.bench.wording import REASONS, run

ROOT = Path(__file__).parents[2]
CODE = """package x

const efaPrefix = `infiniband (rdmap|efa_)\\S*:`

var patternDefinitions = map[string]patternDefinition{
	"tx_timeout": {
		// A comment.
		re:      regexp.MustCompile(`mlx5_core.*TX timeout detected`),
		isFatal: true,
	},
	"efa_admin_cmd_failed": {
		re: regexp.MustCompile(
			efaPrefix + `.*Failed to process` + ` command`),
		isFatal: false,
	},
	newPatternName: {
		re:      regexp.MustCompile(`mlx5_core.*is unhappy`),
		isFatal: false,
	},
}
"""
TESTS = """package x

var lines = []string{
	"kernel: [ 12.3] mlx5_core 0000:65:00.0 eth0: TX timeout detected",
	`mlx5_core 0000:65:00.0 eth0: TX timeout detected`,
	"infiniband rdmap0s6: Failed to process command CREATE_QP (opcode 6) comp_status 1 err -22",
	"mlx5_core 0000:65:00.0: it is unhappy",
}
"""


def put(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_patterns_that_opsd_does_not_hear_are_named_unless_there_is_a_reason(tmp_path: Path) -> None:
    """In each of the three ways in which they are written."""
    nic = tmp_path / "NVSentinel/health-monitors/syslog-health-monitor/pkg/nicdriver"
    put(nic / "config.go", CODE)
    put(nic / "efa_test.go", TESTS)
    rules = [
        {"reason": "OOMKilling", "pattern": r"Killed process \d+ (.+) total-vm"},
        {"reason": "UnregisterNetDevice", "pattern": r"unregister_netdevice: waiting"},
    ]
    put(
        tmp_path / "node-problem-detector/config/kernel-monitor.json",
        json.dumps({"plugin": "kmsg", "logPath": "/dev/kmsg", "rules": rules}),
    )
    put(
        tmp_path / "node-problem-detector/test/problems/all",
        "[1.2] Killed process 7 (python) total-vm:1kB, anon-rss:1kB, file-rss:1kB\n"
        "[1.3] unregister_netdevice: waiting for lo to become free. Usage count = 1\n",
    )
    put(tmp_path / "gpud/components/os/kmsg_matcher.go", "regexNever = `nobody says this`\n")
    found = run(tmp_path)
    assert found["NVSentinel"] == {
        "patterns": 3, "heard": 1, "explained": 1, "unexplained": "newPatternName", "without a line of theirs": "",
    }  # fmt: skip
    assert found["node-problem-detector"]["explained"] == found["node-problem-detector"]["heard"] == 1
    assert found["gpud"]["without a line of theirs"] == "Never"


def test_each_silence_has_a_row_in_the_guide_of_operations() -> None:
    """The reasons stand there only."""
    guide = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    rows = [row["message"] for row in tomllib.loads(REASONS.read_text(encoding="utf-8"))["row"]]
    assert [row for row in rows if f"\n| {row} | " not in guide] == []


def test_a_folder_without_clones_is_refused(tmp_path: Path) -> None:
    """With their names."""
    with pytest.raises(BenchError, match="no clone of gpud, node-problem-detector, NVSentinel"):
        run(tmp_path)
