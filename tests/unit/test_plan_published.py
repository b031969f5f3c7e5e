"""A plan against what others have published of their runs, with the tolerances of ``tests/fakes/published.py``."""

from __future__ import annotations

import pytest

from opsd.plan.hardware import FITTED, hardware_of
from opsd.plan.layout import Layout, problem
from opsd.plan.search import search
from opsd.plan.step_time import step_time
from opsd.trainer import counts
from opsd.trainer.config import Config
from opsd.trainer.hf.config import settings_of
from tests.fakes.plans import run_of
from tests.fakes.published import CONFIGS, FITS, RUNS, SIZES, SPEEDS, TIMES, Run, Speed, Time


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_as_published(name: str) -> None:
    """All parameters, and those that a token meets."""
    size, model = SIZES[name], settings_of(CONFIGS[name])
    assert counts.parameters(model) == pytest.approx(size.total, rel=size.within)
    assert counts.active_parameters(model) == pytest.approx(size.active, rel=size.within)


@pytest.mark.parametrize("time", TIMES, ids=lambda time: time.config)
def test_gpu_hours_follow_from_the_published_mfu(time: Time) -> None:
    """FLOP over the rate: the hours that the run is known to have taken."""
    config = run_of(time.config, f"data.sequence={time.sequence}")
    flops = time.tokens * counts.flops_per_token(config.model, time.sequence)
    hours = flops / (time.mfu * hardware_of("h100").peak.value) / 3600
    assert hours == pytest.approx(time.gpu_hours, rel=time.within)


def predicted(speed: Speed) -> float:
    """Tokens/s of a GPU."""
    config: Config = run_of(speed.config, *speed.settings)
    layout = Layout.of(config)
    assert problem(config, layout, speed.gpus) is None
    hardware = hardware_of(speed.gpu)
    given = {name: hardware.figures()[name]._replace(value=value) for name, value in speed.given.items()}
    step = step_time(config, layout, speed.gpus, hardware.given(given))
    return config.data.batch * config.data.sequence / step.total / speed.gpus


@pytest.mark.parametrize("speed", SPEEDS, ids=lambda speed: f"{speed.config}-{speed.gpus}-{speed.gpu}")
def test_speeds_are_predicted(speed: Speed) -> None:
    """In layouts that the model was not fitted to."""
    assert predicted(speed) == pytest.approx(speed.tokens_per_s, rel=speed.within)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.config}-{run.gpus}")
def test_runs_of_other_trainers_are_predicted(run: Run) -> None:
    """Pipelines and tensor parallelism from 22 B to 1 T, with errors that do not grow with the model."""
    config, hardware = run_of(run.config, *run.settings), hardware_of(run.gpu)
    step = step_time(config, Layout.of(config), run.gpus, hardware)
    tokens = config.data.batch * config.data.sequence / step.total / run.gpus
    mfu = tokens * counts.flops_per_token(config.model, config.data.sequence) / hardware.peak.value
    assert mfu == pytest.approx(run.mfu, rel=run.within)


def test_llama_3_405b_runs_fastest_in_a_layout_like_its_own() -> None:
    """TP 8 x PP 16 with several stages per rank, at the 38 to 43 % that were reached (arXiv 2407.21783)."""
    config = run_of("llama-3-405b", "data.batch=2048")
    best = search(config, 16_384, hardware_of("h100")).fitting[0]
    assert (best.layout.tp, best.layout.pp, best.layout.schedule) == (8, 16, "interleaved")
    tokens = config.data.batch * config.data.sequence / best.step.total / 16_384
    assert 0.38 <= tokens * counts.flops_per_token(config.model, 8192) / 989.4e12 <= 0.43


@pytest.mark.parametrize("speed", FITS, ids=lambda speed: f"{speed.gpu}-{speed.tokens_per_s}")
def test_the_fit_is_that_of_its_source(speed: Speed) -> None:
    """Each fitted figure gives the speed that it was fitted to."""
    assert speed.gpu in FITTED
    assert predicted(speed) == pytest.approx(speed.tokens_per_s, rel=speed.within)
