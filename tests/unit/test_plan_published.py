"""A plan against what others have published of their runs, with the tolerances of ``tests/fakes/published.py``."""

from __future__ import annotations

import pytest

from opsd.plan.hardware import FITTED, hardware_of
from opsd.plan.layout import Layout, problem
from opsd.plan.step_time import step_time
from opsd.trainer import counts
from opsd.trainer.config import Config
from opsd.trainer.hf.config import settings_of
from tests.fakes.plans import run_of
from tests.fakes.published import CONFIGS, FITS, SIZES, SPEEDS, TIMES, Speed, Time


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


@pytest.mark.parametrize("speed", FITS, ids=lambda speed: speed.gpu)
def test_the_fit_is_that_of_its_source(speed: Speed) -> None:
    """Each fitted figure gives the speed that it was fitted to."""
    assert speed.gpu in FITTED
    assert predicted(speed) == pytest.approx(speed.tokens_per_s, rel=speed.within)
