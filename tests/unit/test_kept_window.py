"""The last minutes outlive the agent that is stopped."""

import pytest

from opsd.agent.journal import Journal
from opsd.agent.kept_window import SAVE_S, KeptWindowError, SavedWindow, newest, pack, unpack
from opsd.agent.window import Window
from opsd.collectors.base import Metric, Reading, Sample

TEMPERATURE = Metric("temperature", "Of a GPU.", labels=("gpu",))
WALL = 1_700_000_000.0


def _window():
    return Window("node", seconds=10, witnesses=["nvml"])


def _tick(window, now, *samples, collector="nvml"):
    window.begin(now, WALL + now)
    window.add(collector, Reading(tuple(samples)))


def _sample(value, gpu="0"):
    return Sample(TEMPERATURE, value, (gpu,))


def _stopped(last=3):
    window = _window()
    _tick(window, -1.0)
    for now in range(last + 1):
        _tick(window, float(now), _sample(60.0 + now), _sample(40.0, "1"))
    return pack(window)


def test_a_series_has_its_past_after_a_restart(tmp_path):
    """Values keep their times, and the time without an agent is a gap."""
    before = Journal(tmp_path, lambda _problem: None)
    before.open()
    before.window(_stopped())
    before.close()
    after = Journal(tmp_path, lambda _problem: None)
    kept = after.open().window
    after.close()
    window = _window()
    window.go_on(unpack(kept, window.ticks, 6.0))
    _tick(window, 6.0, _sample(70.0))
    (series,) = window.select("temperature")
    assert [*series.values(60.0)] == [(0.0, 60.0), (1.0, 61.0), (2.0, 62.0), (3.0, 63.0), (6.0, 70.0)]
    assert series.last == 70.0


def test_what_is_older_than_the_window_is_not_told():
    """A long pause leaves nothing to compare with."""
    window = _window()
    window.go_on(unpack(_stopped(), window.ticks, 500.0))
    _tick(window, 500.0, _sample(70.0))
    (series,) = window.select("temperature")
    assert [*series.values(10.0)] == [(500.0, 70.0)]


@pytest.mark.parametrize("seen", [(), ("0",), ("1",), ("0", "1")])
def test_agents_that_end_at_once_lose_nothing(seen):
    """The next agent still gets the series that this one had no time to collect."""
    short = _window()
    short.go_on(unpack(_stopped(), short.ticks, 6.0))
    if seen:
        _tick(short, 6.0, *(_sample(70.0, gpu) for gpu in seen))
    window = _window()
    window.go_on(unpack(pack(short), window.ticks, 8.0))
    _tick(window, 8.0, _sample(80.0), _sample(80.0, "1"))
    between = {gpu: [(6.0, 70.0)] if gpu in seen else [] for gpu in ("0", "1")}
    first, second = ([*series.values(60.0)] for series in window.select("temperature"))
    assert first == [(0.0, 60.0), (1.0, 61.0), (2.0, 62.0), (3.0, 63.0), *between["0"], (8.0, 80.0)]
    assert second == [(0.0, 40.0), (1.0, 40.0), (2.0, 40.0), (3.0, 40.0), *between["1"], (8.0, 80.0)]


def test_before_its_first_tick_a_window_without_a_past_is_nothing():
    """The next agent begins with nothing, without a word of a broken window."""
    assert pack(_window()) == b""


def test_a_user_gets_no_past_that_a_driver_told():
    """The same name from another kind of source is another series."""
    window = _window()
    window.go_on(unpack(_stopped(), window.ticks, 6.0))
    _tick(window, 6.0, _sample(70.0), collector="ranks")
    (series,) = window.select("temperature")
    assert [*series.values(60.0)] == [(6.0, 70.0)]


def test_a_steady_series_is_unchanged_since_before_the_restart():
    """What has not moved has not moved because of a restart either."""
    window = _window()
    window.go_on(unpack(_stopped(), window.ticks, 6.0))
    _tick(window, 6.0, _sample(70.0), _sample(40.0, "1"))
    assert [series.unchanged(4.0) for series in window.select("temperature")] == [False, True]


@pytest.mark.parametrize("kept", [b"", b"x", _stopped()[:-20], _stopped()[:40]])
def test_what_is_no_window_is_refused(kept):
    """A file that is cut or foreign leaves the window empty."""
    with pytest.raises(KeptWindowError):
        unpack(kept, _window().ticks, 6.0)


@pytest.mark.parametrize(("ticks", "now"), [(30, 6.0), (11, 2.0)])
def test_other_ticks_or_an_earlier_clock_are_refused(ticks, now):
    """The slots of the rings, and the clock of their times, are those of one configuration and one boot."""
    with pytest.raises(KeptWindowError):
        unpack(_stopped(), ticks, now)


def test_a_killed_agent_leaves_its_last_seconds(tmp_path):
    """They are as old as the last time at most, and newer than what the journal has of an earlier stop."""
    saved, window = SavedWindow(tmp_path), _window()
    for now in range(31):
        _tick(window, float(now), _sample(60.0 + now))
        saved.save(window)
    assert [path.name for path in tmp_path.iterdir()] == ["window"]
    past = newest((_stopped(), saved.read()), window.ticks, 40.0)
    assert 30.0 - SAVE_S < past.now <= 30.0


def test_of_several_windows_one_that_can_be_read_is_taken():
    """One that cannot does not keep the agent from the other; only if none can there is an error."""
    ticks = _window().ticks
    assert newest((b"x", _stopped()), ticks, 6.0).now == 3.0
    assert newest((b"", b""), ticks, 6.0) is None
    with pytest.raises(KeptWindowError):
        newest((b"x", b""), ticks, 6.0)


def test_without_a_folder_in_memory_nothing_is_saved(tmp_path):
    """And one that cannot be written is an error that the loop tells once."""
    window = _window()
    _tick(window, 1.0, _sample(60.0))
    SavedWindow(None).save(window)
    assert SavedWindow(None).read() == SavedWindow(tmp_path).read() == b""
    with pytest.raises(OSError, match="No such file"):
        SavedWindow(tmp_path / "none").save(window)
