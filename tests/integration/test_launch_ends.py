"""How a run under `opsd launch` ends, and what it leaves: asked to, by force, or with its launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from opsd import exitcodes
from opsd.launch.io.loop import Loop
from opsd.launch.ranks.process import collect_orphans, descendants, spawn, sweep
from opsd.launch.ranks.ranks import Generation
from opsd.launch.ranks.settings import Program, Settings
from opsd.launch.ranks.shutdown import Teardown
from opsd.launch.ranks.workers import StandbyPool
from opsd.rundir import RunFolders
from opsd.slurm.run_owner import WATCH_S
from opsd.slurm.runner import Output, run_command
from tests.fakes.clock import eventually
from tests.fakes.launched import TRAIN, Launched, alive
from tests.fakes.webhook import Webhook

# How a run under ``opsd launch`` ends: asked to, by force, or with its launcher; and what it may leave behind.


TWO = "--nproc-per-node=2"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("everyone", [False, True])
def test_stop_at_a_step_boundary(tmp_path: Path, number: signal.Signals, everyone: bool) -> None:
    """SIGTERM and SIGUSR1 let the ranks stop at a step boundary, also when Slurm signals every process of the job."""
    source = TRAIN + "train(10_000)\nprint('stopped in order')"
    with Launched(tmp_path, source, TWO) as launched:
        started = launched.event("generation_started")
        launched.until(lambda: len(list(launched.memory.glob("rank-*.page"))) == 2)
        if everyone:
            for entry in started["ranks"]:
                os.kill(entry["pid"], number)
        launched.signal(number)
        assert launched.wait() == exitcodes.REQUEUE
        assert launched.log(0) == launched.log(1) == "stopped in order\n"
        stopped = launched.event("stopped")
        assert stopped["signal"] == number.name
        assert launched.events()[-1]["exit_code"] == exitcodes.REQUEUE
        assert not launched.events("rank_exited")
        assert launched.err.count("stop requested: the ranks have 120 s to save and end") == 1


UNAWARE = """
import os, sys, time
from opsd.client import Reporter
reporter = Reporter.from_env()
reporter.step(step=7)
print("ready", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""

UNHANDLED = "import time\nprint('ready', flush=True)\ntime.sleep(1000)\n"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (UNAWARE, "stopped in good order after SIGTERM; no checkpoint was seen"),
        (UNHANDLED, "ended by SIGTERM, which ranks do not handle"),
    ],
)
def test_a_stop_of_a_program_that_reads_no_request(tmp_path: Path, source: str, reason: str) -> None:
    """It is said at once that the ranks were asked, and at the end what was seen of a checkpoint."""
    end = tmp_path / "end"
    with Launched(tmp_path, source, args=(str(end),)) as launched:
        launched.until(lambda: "ready" in launched.log())
        launched.signal(signal.SIGTERM)
        launched.until(lambda: "stop requested: the ranks have 120 s to save and end (SIGTERM; " in launched.err)
        end.touch()
        assert launched.wait() == exitcodes.REQUEUE
        assert launched.event("finished")["reason"] == reason


@pytest.mark.parametrize("gives_way", [False, True])
def test_rank_without_page_gets_the_signal(tmp_path: Path, gives_way: bool) -> None:
    """A program that does not know opsd is sent SIGTERM; its own handler may end it in order.

    The run can go on, and has a report of what it did, unless it gives way to others.
    """
    source = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved")))
        print("ready", flush=True)
        time.sleep(1000)
    """
    with Launched(tmp_path, source, *["--give-way"] * gives_way) as launched:
        launched.until(lambda: "ready" in launched.log())
        launched.signal(signal.SIGTERM)
        assert launched.wait() == exitcodes.REQUEUE
        assert "saved" in launched.log()
        assert (launched.run / "report.html").exists() is not gives_way


def test_rank_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """Who does not stop in time is killed, and the exit code does not claim that anything was saved."""
    source = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep(1000)
    """
    with Launched(tmp_path, source, "--stop-timeout=0.5") as launched:
        launched.until(lambda: "ready" in launched.log())
        launched.signal(signal.SIGTERM)
        assert launched.wait() == exitcodes.FAILED
        assert "rank 0 did not stop in time after SIGTERM" in launched.event("finished")["reason"]


@pytest.mark.timeout(120)
def test_a_rank_that_stays_after_the_others_is_named(tmp_path: Path) -> None:
    """The run waits for it, and says so once."""
    program = TRAIN + "train(5)\nif rank == 1:\n    time.sleep(33)\n"
    with Launched(tmp_path, program, "--nproc-per-node", "3") as run:
        assert run.wait(100) == 0, run.err
        assert run.err.count("rank 1 has not ended 30 s after rank") == 1, run.err
        assert "without progress it counts as hung" in run.err


def test_interrupt_stops_fast(tmp_path: Path) -> None:
    """Ctrl-C ends everything at once, with its own exit code."""
    with Launched(tmp_path, TRAIN + "train(10_000)", TWO) as launched:
        pids = [entry["pid"] for entry in launched.event("generation_started")["ranks"]]
        launched.signal(signal.SIGINT)
        assert launched.wait(10) == exitcodes.INTERRUPTED
        assert not any(alive(pid) for pid in pids)


FORKS = """
import os, subprocess, sys, time
for detached in (False, True):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=detached)
    print(child.pid, flush=True)
"""


@pytest.mark.parametrize(("ending", "code"), [("", exitcodes.OK), ("os.kill(os.getpid(), 9)", exitcodes.FAILED)])
def test_children_that_outlive_a_rank_are_cleaned_up(tmp_path: Path, ending: str, code: int) -> None:
    """Whatever a rank started ends with its generation, daemons in sessions of their own included."""
    with Launched(tmp_path, FORKS + ending, "--max-restarts=0") as launched:
        assert launched.wait() == code
        pids = [int(line) for line in launched.log().split()]
        assert len(pids) == 2
        assert not any(alive(pid) for pid in pids)


SAVES = """
import os, subprocess, sys
from opsd.client import PERSIST, Reporter
reporter = Reporter.from_env()
save = "import pathlib, sys, time; time.sleep(1.5); pathlib.Path(sys.argv[1]).write_text('saved')"
child = subprocess.Popen([sys.executable, "-c", save, sys.argv[1]], start_new_session=True)
reporter.add_worker(child.pid, PERSIST)
reporter.step()
os.kill(os.getpid(), 9)
"""


def test_a_checkpoint_being_written_outlives_its_rank(tmp_path: Path) -> None:
    """The process that has the staged state in hand is left to finish when its rank is killed."""
    target = tmp_path / "checkpoint"
    with Launched(tmp_path, SAVES, "--max-restarts=0", args=(str(target),)) as launched:
        assert launched.wait() == exitcodes.FAILED
        launched.until(target.exists)


def test_ranks_die_with_their_launcher(tmp_path: Path) -> None:
    """A launcher that is killed leaves no rank behind, and the next one of the same run takes over and counts on."""
    with Launched(tmp_path, TRAIN + "train(10_000)", TWO) as launched:
        pids = [entry["pid"] for entry in launched.event("generation_started")["ranks"]]
        launched.until(lambda: len(list(launched.memory.glob("rank-*.page"))) == 2)
        launched.signal(signal.SIGKILL)
        launched.until(lambda: not any(alive(pid) for pid in pids))
    with Launched(tmp_path, TRAIN + "train(3)", TWO) as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.events("generation_started")[-1]["generation"] == 2


@contextmanager
def held(launched: Launched) -> Iterator[None]:
    """Meanwhile the guard of the launcher does nothing; it ends then."""
    children = psutil.Process(launched.process.pid).children()
    (guard,) = (child for child in children if any("leftovers.py" in word for word in child.cmdline()))
    guard.suspend()
    try:
        yield
    finally:
        guard.kill()


def test_ranks_whose_launcher_was_killed_before_they_ran_never_do(tmp_path: Path) -> None:
    """Its interpreter may need seconds to start on a busy node. It looks itself, without the guard of the launcher."""
    slow, started, gate = (tmp_path / name for name in ("slow-python", "started", "gate"))
    waits = f"echo $$ >>{started}; until test -e {gate}; do sleep 0.1; done"
    slow.write_text(f'#!/bin/sh\ntest "$1" = -c || {{ {waits}; }}\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    program = f"open({str(tmp_path / 'ran')!r}, 'w').close()"
    with Launched(tmp_path, program, env={"PYTHON_EXEC": str(slow)}) as launched:
        launched.until(started.exists)
        with held(launched):
            launched.process.kill()
            launched.process.wait()
            gate.touch()
            launched.until(lambda: not any(alive(int(pid)) for pid in started.read_text().split()))
    assert not (tmp_path / "ran").exists()


def test_people_are_notified_and_a_dead_receiver_is_one_line(tmp_path: Path) -> None:
    """Start, restart and end, with cause and report; the URL is in no file, no message and no rank's environment."""
    source = TRAIN + "assert 'OPSD_NOTIFY' not in os.environ\ntrain(20, at=5, do=lambda: restarts or os._exit(3))"
    with Webhook() as webhook:
        where = f"{webhook.url} http://127.0.0.1:9/s3cret"
        with Launched(tmp_path, source, env={"OPSD_NOTIFY": where}) as launched:
            assert launched.wait() == exitcodes.OK
        webhook.shutdown()
        told = [(post["event"], str(post["text"])) for post in webhook.posts]
    assert [event for event, _ in told] == ["started", "restarted", "finished"]
    assert "failed after step 5 with exit code 3; it goes on with step" in told[1][1]
    assert told[2][1].endswith(f"report: {launched.run / 'report.html'}")
    assert (tmp_path / "err").read_text().count("not notified: 127.0.0.1") == 1
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "prog.py"]
    assert not [path for path in written if b"s3cret" in path.read_bytes()]


# A launcher that is killed takes everything with it that its ranks have started, and the next start finds nothing.


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


# Ending what a generation has left, with real processes below the tests' own.


def others() -> Callable[[int], bool]:
    """True for the processes that are there already: those of other tests are to be left alone."""
    return frozenset(descendants(os.getpid())).__contains__


def test_a_command_that_a_thread_runs_is_not_swept() -> None:
    """A generation may end while a thread asks Slurm: its command goes on, and the thread gets its exit code."""
    protected, loop = others(), Loop()
    outcome: list[Output | OSError] = []
    deadline = time.monotonic() + 30

    def done(result: Output | OSError) -> None:
        outcome.append(result)
        loop.stop()

    def look() -> None:
        sweep(protected)
        collect_orphans(protected)
        assert time.monotonic() < deadline
        loop.later(0.01, look)

    loop.run_in_thread(lambda: run_command(["sh", "-c", "sleep 0.5; exit 3"], 20.0), done)
    look()
    loop.run()
    assert outcome == [Output(3, "", "")]


def test_what_ranks_have_left_gets_one_sigterm(tmp_path: Path) -> None:
    """A second one would have it drop what it has not written yet."""
    protected, loop = others(), Loop()
    program = """
import signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
print("ready", flush=True)
while not told:
    time.sleep(0.01)
time.sleep(0.3)
print(len(told), flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as left:
        assert left.stdout is not None
        assert left.stdout.readline() == "ready\n"
        Teardown(Generation(1), loop, protected, done=loop.stop, stuck=lambda _: None, gracefully=True).advance()
        loop.run()
        assert left.stdout.read() == "1\n"


def test_a_process_that_does_not_end_does_not_hold_up_the_loop() -> None:
    """Its pid stays taken, and the orphans' collection gets it once it has ended."""
    protected = others()
    child = spawn(["sleep", "1000"], env={}, cwd=Path("/"), output=1)
    child.reap(0.05)
    assert Path(f"/proc/{child.pid}").exists()
    child.kill_group()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child.pid}").exists():
        collect_orphans(protected)
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_standby_worker_that_was_killed_is_collected_by_the_loop(tmp_path: Path) -> None:
    """Until then it counts as the pool's own, so that no teardown waits for what the kernel may not let go."""
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport os, sys, time\nos.write(int(sys.argv[3]), b'{{\"ready\": false}}')\n"
        "time.sleep(1000)\n"
    )
    python.chmod(0o755)
    loop = Loop()
    program = Program("script", str(python), (), str(python), tmp_path)
    folders = RunFolders.create("r", folder=tmp_path / "run", logs=None, shared=tmp_path / "shm")
    pool = StandbyPool(Settings(program, "r", "", "n1", 1, "r"), folders, loop)
    pool.stand_by()
    pool.refill()
    (pid,) = pool.pids
    deadline = time.monotonic() + 30

    def look() -> None:
        assert time.monotonic() < deadline
        loop.later(0.01, look if pool.pids else loop.stop)

    look()
    loop.run()
    assert not Path(f"/proc/{pid}").exists()
    pool.close()


# Processes below the launcher that no rank has started are left alone, and nothing of a rank stays all the same.


DAEMONS = """
import subprocess, sys
stay = [sys.executable, "-c", "import time; time.sleep(1000)"]
print("daemon", subprocess.Popen(stay, start_new_session=True).pid, flush=True)
print("daemon", os.popen("setsid sleep 1000 >/dev/null & echo $!").read().strip(), flush=True)
"""

FAILING = TRAIN + DAEMONS + "train(40, at=20, do=lambda: restarts == 0 and os.kill(os.getpid(), signal.SIGKILL))"


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Path]:
    """A file of pids, one a line, which are killed in the end."""
    path = tmp_path / "foreign"
    path.touch()
    yield path
    for pid in map(int, path.read_text().split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def daemons(launched: Launched, generation: int) -> list[int]:
    """What the rank of a generation has started."""
    return [int(line.split()[1]) for line in launched.log(0, generation).splitlines() if line.startswith("daemon")]


def test_what_a_shell_ran_before_it_became_the_launcher(tmp_path: Path, foreign: Path) -> None:
    """A restart and the end kill what ranks have started, and neither the shell's children nor their orphans."""
    shell = (
        f"sleep 1000 & echo $! >> {foreign}; setsid sleep 1000 & echo $! >> {foreign}\n"
        f"bash -c 'sleep 1; sleep 1000 & echo $! >> {foreign}' &\n"
        'exec "$@"'
    )
    with Launched(tmp_path, FAILING, within=("bash", "-c", shell, "bash")) as launched:
        launched.until(lambda: len(foreign.read_text().split()) == 3)
        assert launched.wait() == exitcodes.OK
        assert len(launched.events("generation_started")) == 2
        assert [len(daemons(launched, generation)) for generation in (1, 2)] == [2, 2]
        assert not any(alive(pid) for generation in (1, 2) for pid in daemons(launched, generation))
        assert [alive(int(pid)) for pid in foreign.read_text().split()] == [True, True, True]


def test_a_launcher_that_gets_all_orphans_of_a_container(tmp_path: Path) -> None:
    """As the first process of its namespace it has children that came in from outside; they are left alone, too."""
    within = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    if subprocess.run([*within, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a namespace for processes is not permitted here")
    source = FAILING.replace("train(40", "train(100_000")
    with Launched(tmp_path, source, within=within) as launched:
        launched.until(lambda: bool(launched.log()))
        (first,) = Path(f"/proc/{launched.process.pid}/task/{launched.process.pid}/children").read_text().split()
        enter = ("nsenter", "--pid", f"--target={first}", "bash", "-c", "setsid sleep 2000 >/dev/null & echo")
        subprocess.run(enter, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        launched.event("resumed")
        launched.until(lambda: sleepers(first) == ["1000", "2000"])


def sleepers(parent: str) -> list[str]:
    """For how long the children of ``parent`` sleep."""
    commands = []
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with contextlib.suppress(OSError):  # it has ended
            commands.append(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
    return sorted(command[1] for command in commands if command[0] == "sleep")
