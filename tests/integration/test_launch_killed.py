"""A launcher that is killed takes everything with it that its ranks have started, and the next start finds nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.slurm.run_owner import WATCH_S
from tests.fakes.clock import eventually
from tests.fakes.launched import TRAIN, Launched, alive

STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "a") as file:
    print(os.getpid(), file=file, flush=True)
if sys.argv[2:]:
    os.closerange(0, 4096)
time.sleep(1000)
"""
WRAPPER = """#!/bin/bash
here=$(dirname "$0")
[ -e "$here/second" ] && exit 0
python "$here/stubborn.py" "$here/started" &
setsid python "$here/stubborn.py" "$here/started" &
env -i "$(command -v python)" "$here/stubborn.py" "$here/started" &
python "$here/stubborn.py" "$here/started" close &
python "$here/stubborn.py" "$here/started"
echo not reached
"""
STARTED = 5


def wrapped(folder: Path, *flags: str) -> Launched:
    """A launcher of a shell script, whose programs ignore SIGTERM and write their pids into the file ``started``."""
    (folder / "stubborn.py").write_text(STUBBORN)
    script = folder / "wrapper.sh"
    script.write_text(WRAPPER)
    script.chmod(0o755)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return Launched(folder, "", "--no-python", *flags, program=(str(script),), env={"PATH": path})


def started(folder: Path) -> list[int]:
    """The pids of the wrapper's programs, once there are all."""
    path = folder / "started"
    assert eventually(lambda: path.exists() and len(path.read_text().split()) == STARTED)
    return [int(pid) for pid in path.read_text().split()]


def test_nothing_below_a_shell_script_outlives_a_killed_launcher(tmp_path: Path) -> None:
    """Children, a daemon, one without environment and one without descriptors, all of which ignore SIGTERM."""
    with wrapped(tmp_path) as launched:
        pids = started(tmp_path)
        assert all(alive(pid) for pid in pids)
        launched.signal(signal.SIGKILL)
        launched.until(lambda: not any(alive(pid) for pid in pids))
        launched.until(lambda: "the launcher is gone; " in launched.err)


def test_the_next_launcher_ends_what_nobody_has_ended(tmp_path: Path) -> None:
    """The guard was killed as well: what carries the run's mark is ended by the run's next launcher on this node."""
    with wrapped(tmp_path) as launched:
        pids = started(tmp_path)
        (guard,) = guards(launched.process.pid)
        launched.signal(signal.SIGSTOP)  # it would start another guard
        os.kill(guard, signal.SIGKILL)
        launched.signal(signal.SIGKILL)
        assert launched.wait() == -signal.SIGKILL
    marked = [pid for pid in pids if b"OPSD_LAUNCHER" in Path(f"/proc/{pid}/environ").read_bytes()]
    try:
        assert len(marked) == STARTED - 1
        (tmp_path / "second").touch()
        with wrapped(tmp_path) as launched:
            assert launched.wait() == exitcodes.OK
            assert "4 processes that an earlier launcher of this run has left were killed" in launched.err
        assert not any(alive(pid) for pid in marked)
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


COMPANIONS = {
    "alone": ('exec python "$here/stubborn.py" "$here/started"', 1),
    "with a child and a daemon": (
        'python "$here/stubborn.py" "$here/started" & setsid python "$here/stubborn.py" "$here/started" & wait', 2,
    ),
    "without environment": ('exec env -i "$(command -v python)" "$here/stubborn.py" "$here/started"', 1),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "guarded"),
    [*((kind, True) for kind in COMPANIONS), ("alone", False), ("with a child and a daemon", False)],
)
def test_no_companion_outlives_a_killed_launcher(tmp_path: Path, kind: str, guarded: bool) -> None:
    """The guard ends companions and what they have started, or else the next launcher, if they have an environment."""
    command, count = COMPANIONS[kind]
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    script = tmp_path / "companion.sh"
    script.write_text(f'#!/bin/bash\nhere=$(dirname "$0")\n{command}\n')
    script.chmod(0o755)
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    path, pids = tmp_path / "started", list[int]()
    try:
        with Launched(tmp_path, "import time; time.sleep(1000)", "--beside", str(script), env=env) as launched:
            launched.event("generation_started")
            launched.until(lambda: path.exists() and len(path.read_text().split()) == count)
            pids = [int(pid) for pid in path.read_text().split()]
            if not guarded:
                (guard,) = guards(launched.process.pid)
                launched.signal(signal.SIGSTOP)
                os.kill(guard, signal.SIGKILL)
            launched.signal(signal.SIGKILL)
            launched.wait()
        if not guarded:
            with Launched(tmp_path, "") as launched:
                assert launched.wait() == exitcodes.OK
                assert "that an earlier launcher of this run has left were killed" in launched.err
        assert eventually(lambda: not any(alive(pid) for pid in pids))
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_the_run_of_a_killed_launcher_goes_on_at_once(tmp_path: Path) -> None:
    """Nobody has to wait until its lease is stale: it ran on this node alone, and the kernel says that it is dead."""
    with Launched(tmp_path, TRAIN + "train(1000, at=5, do=lambda: None, step_s=0.05)") as launched:
        launched.event("generation_started")
        launched.signal(signal.SIGKILL)
        launched.wait()
    began = time.monotonic()
    with Launched(tmp_path, TRAIN + "train(1)") as launched:
        launched.until(lambda: len(launched.events("generation_started")) == 2)
        assert time.monotonic() - began < WATCH_S, launched.err


def test_a_guard_that_is_killed_is_replaced(tmp_path: Path) -> None:
    """It knows the ranks that were there before it."""
    with wrapped(tmp_path) as launched:
        pids = started(tmp_path)
        (guard,) = guards(launched.process.pid)
        os.kill(guard, signal.SIGKILL)
        launched.until(lambda: guards(launched.process.pid) not in ([], [guard]))
        (second,) = guards(launched.process.pid)
        launched.until(lambda: b"leftovers.py" in Path(f"/proc/{second}/cmdline").read_bytes())
        launched.signal(signal.SIGKILL)
        launched.until(lambda: not any(alive(pid) for pid in pids))


def test_the_guard_is_no_rank_and_ends_with_its_launcher(tmp_path: Path) -> None:
    """It survives a restart of the ranks, and the signals that are sent to whole jobs."""
    source = TRAIN + "train(60, at=20, do=lambda: restarts == 0 and os.kill(os.getpid(), signal.SIGKILL), step_s=0.05)"
    with Launched(tmp_path, source) as launched:
        launched.event("generation_started")
        (guard,) = guards(launched.process.pid)
        os.kill(guard, signal.SIGTERM)
        launched.until(lambda: len(launched.events("generation_started")) == 2)
        assert guards(launched.process.pid) == [guard]
        assert launched.wait() == exitcodes.OK
        launched.until(lambda: not alive(guard))
        assert "launcher is gone" not in launched.err


SUBMITTING = """
import os, subprocess, time
for job in ("17", ""):
    env = os.environ | {"SLURM_JOB_ID": job}
    print(subprocess.Popen(["sleep", "1000"], start_new_session=True, env=env).pid, flush=True)
time.sleep(1000)
"""


def test_a_job_that_a_rank_has_submitted_lives_on(tmp_path: Path) -> None:
    """Sbatch hands on the environment of the rank with its mark; the job is none of the launcher's business."""
    with Launched(tmp_path, SUBMITTING) as launched:
        launched.until(lambda: len(launched.log().split()) == 2)
        submitted, left = map(int, launched.log().split())
        try:
            launched.signal(signal.SIGKILL)
            launched.until(lambda: not alive(left))
            assert alive(submitted)
        finally:
            os.kill(submitted, signal.SIGKILL)


def guards(launcher: int) -> list[int]:
    """The launcher's guards."""
    below = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in below if b"leftovers.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
