"""What opsd does about heat: which power limit it sets, and when it leaves the GPU alone."""

from opsd.scenarios.model import Scenario
from opsd.scenarios.player import play

HOT = "opsd_gpu_throttle_seconds_total{reason=sw_thermal}"


def limits(*moments, duration=40, on=()):
    """The arguments of the power limits that the agent sets on GPU 1, in their order."""
    scenario = Scenario.model_validate({"title": "heat", "duration": duration, "at": list(moments), "on": list(on)})
    return [action.args for _, _, action in play(scenario, "act").actions if action.verb == "set_power_limit"]


def change(t, **series):
    """A change of series of GPU 1 at second ``t``."""
    return {"t": t, "gpu": 1, "set": series}


def test_the_limit_goes_down_by_fifteen_percent():
    """A GPU that draws what it may gets 85 % of that."""
    hot = change(10, **{HOT: {"rate": 1.0}, "DCGM_FI_DEV_POWER_USAGE": 690})
    assert limits(hot) == [{"gpu": 1, "watts": 595, "restore_watts": 700.0}]


def test_a_limit_above_what_the_gpu_draws_would_change_nothing():
    """Throttled to 460 W, it must be limited to less than that to become any cooler."""
    hot = change(10, **{HOT: {"rate": 1.0}, "DCGM_FI_DEV_POWER_USAGE": {"to": 460, "noise": 0}})
    assert [args["watts"] for args in limits(hot)] == [437]


def test_the_limit_never_falls_below_sixty_percent_of_the_default():
    """A GPU that is throttled to next to nothing is not helped by software."""
    hot = change(10, **{HOT: {"rate": 1.0}, "DCGM_FI_DEV_POWER_USAGE": 200})
    assert [args["watts"] for args in limits(hot)] == [420]


def test_every_attempt_remembers_the_limit_before_the_first():
    """What is to be restored after the service is what was in force before opsd came."""
    hot = change(10, **{HOT: {"rate": 1.0}})
    answer = {"action": "set_power_limit", "after": 1, "gpu": 1, "set": {"opsd_gpu_power_limit_watts": 595}}
    assert [args["restore_watts"] for args in limits(hot, duration=100, on=[answer])] == [700.0, 700.0]


def costs(*moments):
    """What the first incident of GPU 1 costs, in words, at its end."""
    scenario = Scenario.model_validate({"title": "heat", "duration": 60, "at": list(moments)})
    return next(i.cost.text for i in play(scenario, "observe").incidents.values() if i.kind == "gpu_throttle")


def test_a_throttle_without_effect_on_the_clock_costs_next_to_nothing():
    """The counter of the driver moves; 0 % would be no cost at all."""
    hot = change(10, **{HOT: {"rate": 1.0}})
    assert costs(hot) == "job 4242 loses less than 1% (4 GPUs, estimated)"


def test_a_gpu_that_has_become_idle_is_left_alone():
    """The job ended before the effect could be seen: that it is cool now proves nothing and calls for nothing."""
    hot = change(10, **{HOT: {"rate": 1.0}})
    idle = change(30, **{HOT: {"rate": 0.0}, "DCGM_FI_DEV_GPU_UTIL": 0, "DCGM_FI_DEV_POWER_USAGE": 70})
    assert len(limits(hot, idle, duration=200)) == 1
