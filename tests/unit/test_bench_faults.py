"""The benches on the test cluster: what is drawn from a seed, what trials come to, and whose options are whose."""

from __future__ import annotations

from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from opsd.commands.bench import bench
from tests.integration.slurm.sequences import ACTIVE, KINDS, MOST, draw
from tests.integration.slurm.trials import Trial, summary


@given(st.integers(0, 2**32))
def test_a_sequence_is_drawn_from_its_seed(seed: int) -> None:
    """Two to four faults that differ, the first not before the run has settled, and the same each time."""
    faults = draw(seed)
    assert 2 <= len(faults) <= MOST
    assert len({fault.kind for fault in faults} & KINDS.keys()) == len(faults)
    assert faults[0].after > 0
    assert all(fault.place < ACTIVE for fault in faults)
    assert draw(seed) == faults


def test_the_bench_plays_every_kind() -> None:
    """In twenty sequences each kind comes up, and some while the run recovers."""
    faults = [fault for seed in range(1, 21) for fault in draw(seed)]
    assert {fault.kind for fault in faults} == KINDS.keys()
    assert any(fault.after == 0 for fault in faults)


def test_a_trial_that_failed_counts_and_is_not_timed() -> None:
    """The largest of few is their 99th percentile."""
    trials = [Trial(2.0, 3), Trial(0.0, 0, "nothing happened"), Trial(4.0, 5), Trial(2.5, 0)]
    assert summary(trials) == {"p50_s": 2.5, "p99_s": 4.0, "lost_steps_max": 5, "trials": 4, "failed": 1}
    assert summary([Trial(0.0, 0, "nothing happened")])["p50_s"] is None


def test_options_go_with_the_bench_that_has_them() -> None:
    """One that a bench does not know is refused with those that do."""
    refused = CliRunner().invoke(bench, ["restart", "--trials", "3"])
    assert refused.exit_code == 2
    assert "--trials goes with the benchmark simulate and swap only" in refused.output
