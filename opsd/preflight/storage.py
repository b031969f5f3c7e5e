"""Storage compared with what the run needs: tokens per second times bytes per token, checkpoint size per interval."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opsd.preflight import fio
from opsd.preflight.base import Context, Demand, Finding, Measure, Measurement, Outcome, Progress, Verdict
from opsd.preflight.units import duration, quantity

_SIZE: Final = 1 << 30
READ_MARGIN: Final = 3.0
"""The data loader must be able to catch up after a stall: three times the rate that the run consumes."""
CHECKPOINT_SHARE: Final = 0.25
"""A checkpoint that takes longer than this share of its interval will at times overlap the next one."""


def measures() -> tuple[Measure, ...]:
    """What a storage check measures."""
    return (
        Measure("write", "bytes_per_second", "write bandwidth", "higher", noise=0.25),
        Measure("read", "bytes_per_second", "read bandwidth", "higher", noise=0.25),
        Measure("random_read", "operations_per_second", "16 KiB random reads", "higher", noise=0.25),
        Measure("random_read_p99", "seconds", "latency of 16 KiB random reads (p99)", "lower", noise=1.0),
    )


def run(context: Context, progress: Progress, folder: str) -> Outcome:
    """Write, read and read at random in ``folder`` for a third of the time each, then compare with the demand."""
    seconds = context.seconds / 3
    with fio.workspace(folder, _SIZE) as path:
        size = fio.room(folder, _SIZE)
        write = fio.measure(path, "write", block="1m", jobs=2, depth=16, size=size, seconds=seconds)
        progress(1 / 3, "")
        read = fio.measure(path, "read", block="1m", jobs=2, depth=16, size=size, seconds=seconds)
        progress(2 / 3, "")
        random = fio.measure(path, "randread", block="16k", jobs=2, depth=16, size=size, seconds=seconds)
    return Outcome(
        (
            Measurement("write", write.bytes_per_s),
            Measurement("read", read.bytes_per_s),
            Measurement("random_read", random.operations_per_s),
            Measurement("random_read_p99", random.p99_s),
        ),
        tuple(needs(context.demand, folder, read=read.bytes_per_s, write=write.bytes_per_s)),
    )


def needs(demand: Demand, folder: str, *, read: float, write: float) -> Iterator[Finding]:
    """The findings where ``folder`` is too slow for the run. ``read`` and ``write`` are bytes per second."""
    if demand.tokens_per_s:
        consumed = demand.tokens_per_s * demand.bytes_per_token
        verdict = Verdict.FAIL if read < consumed else Verdict.WARN
        if read < consumed * READ_MARGIN:
            reads, wants = quantity(read, "bytes_per_second"), quantity(consumed, "bytes_per_second")
            summary = f"{folder} reads {reads}, {read / consumed:.1f} times the {wants} that the run consumes"
            advice = f"{READ_MARGIN:g} times leave room to catch up: stage the shards on local NVMe"
            yield Finding(verdict, summary, advice)
    if demand.checkpoint_bytes and demand.checkpoint_interval_s:
        took = demand.checkpoint_bytes / write
        share = took / demand.checkpoint_interval_s
        if share > CHECKPOINT_SHARE:
            verdict = Verdict.FAIL if share >= 1 else Verdict.WARN
            size, interval = quantity(demand.checkpoint_bytes, "bytes"), duration(demand.checkpoint_interval_s)
            summary = (
                f"a checkpoint of {size} takes {folder} {duration(took)}, {share:.0%} of its interval of {interval}"
            )
            yield Finding(verdict, summary, "write less often, to faster storage, or from more nodes at once")
