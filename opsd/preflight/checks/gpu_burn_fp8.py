"""The GPUs under full load in fp8, which draws other power than bf16 and uses other units."""

from __future__ import annotations

from dataclasses import replace

from opsd.preflight.base import Context, Outcome, Progress
from opsd.preflight.checks import gpu_burn


def run(context: Context, progress: Progress) -> Outcome:
    """Burn in fp8."""
    return gpu_burn.burn_all(context, progress, fp8_products=True)


CHECK = replace(gpu_burn.CHECK, name="gpu_burn_fp8", title="GPU burn in fp8", run=run, seconds={"burn-in": 600})
