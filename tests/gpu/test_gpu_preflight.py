"""Preflight's GPU checks on real GPUs: they measure all that they declare, find nothing, and burn as hot as torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from opsd.preflight.base import Check, Context, Verdict
from opsd.preflight.checks import gpu_burn, gpu_host_copy, gpu_memory, gpu_peer
from opsd.preflight.judge import judge

sys.path.insert(0, str(Path(__file__).parent))
from turns import in_turns

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

CHECKS = (
    gpu_burn.CHECK,
    gpu_burn.FP8,
    gpu_memory.CHECK,
    gpu_host_copy.CHECK,
    pytest.param(
        gpu_peer.CHECK, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU has no peers")
    ),
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_healthy_gpu_passes(check: Check) -> None:
    """No wrong product, no throttle, no value below its floor."""
    assert check.run is not None
    context = Context(os.uname().nodename, "quick", 10.0)
    judgement = judge(check, check.run(context, lambda share, subject: None), 0.0)
    assert judgement.verdict in (Verdict.PASS, Verdict.WARN), judgement.findings
    assert {measure.name for measure in check.measures if measure.required} <= {v.measure for v in judgement.values}


def test_the_burn_is_as_fast_as_torch() -> None:
    """At least 0.97 of torch's best slice of the same product in the same run."""
    ours, plain = in_turns(torch.device("cuda", 0), 20.0)
    assert ours / plain >= 0.97
