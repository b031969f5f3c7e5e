"""`opsd launch` with real processes: how the program runs, what it finds, and what cannot be started."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import opsd
from opsd import exitcodes
from tests.fakes.launched import TRAIN, Launched

# ``opsd launch`` with real processes: how the program runs, and what others see of the run.


TWO = "--nproc-per-node=2"

STANDARD_SIGNALS = (1 << 31) - 1
"""Signals 1 to 31 of a mask in /proc: what the C library keeps to itself above them is inherited from the shell."""


def test_program_runs_as_python_would_run_it(tmp_path: Path) -> None:
    """Script, arguments, import path, ``__main__`` and the rank's environment are what the program expects."""
    source = """
        import json, os, sys
        main = sys.modules["__main__"]
        print(json.dumps({
            "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "spec": __spec__,
            "same": main.__dict__ is globals(), "env": {k: os.environ.get(k) for k in
            ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OPSD_RUN", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "OMP_NUM_THREADS")},
            "files": sorted(os.listdir("/proc/self/fd")),
        }))
    """
    with Launched(tmp_path, source, TWO, "--redirects=3", args=("--lr", "1e-3", "-m")) as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.out == ""
        seen = json.loads(launched.log(rank=1))
    script = str(tmp_path / "prog.py")
    assert seen["argv"] == [script, "--lr", "1e-3", "-m"]
    assert seen["path"] == str(tmp_path)
    assert (seen["name"], seen["file"], seen["spec"], seen["same"]) == ("__main__", script, None, True)
    assert seen["env"] == {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "OPSD_RUN": "r", "TORCHELASTIC_RUN_ID": "r",
        "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    assert len(seen["files"]) == 5  # stdin, stdout, stderr, the launcher's channel, and the one that lists them


def test_module_runs_as_python_m_would(tmp_path: Path) -> None:
    """With -m the program knows its package, in the working directory first of all."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__init__.py").write_text("")
    (tmp_path / "mine/part.py").write_text("NAME = 'part'\n")
    main = "import sys\nfrom .part import NAME\nprint(NAME, __spec__.name, sys.argv[1:])"
    (tmp_path / "mine/__main__.py").write_text(main)
    with Launched(tmp_path, "", "-m", program=("mine", "a")) as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.out == "part mine.__main__ ['a']\n"


@pytest.mark.parametrize("how", ["script", "module"])
def test_multiprocessing_spawn_finds_main(tmp_path: Path, how: str) -> None:
    """Workers that the program starts with "spawn" find functions of its main module."""
    source = """
        import multiprocessing

        def square(x):
            return x * x

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [1, 2, 3]))
    """
    flags, program = ((), None) if how == "script" else (("-m",), ("prog",))
    with Launched(tmp_path, source, *flags, program=program) as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.out == "[1, 4, 9]\n"


def test_any_executable(tmp_path: Path) -> None:
    """With --no-python the program is executed as it is, with default signals and the rank's environment."""
    script = tmp_path / "prog.sh"
    script.write_text('#!/bin/sh\necho "rank $RANK of $WORLD_SIZE: $1"\ngrep SigIgn /proc/self/status\n')
    script.chmod(0o755)
    with Launched(tmp_path, "", TWO, "--no-python", "--tee=3", program=(str(script), "x")) as launched:
        assert launched.wait() == exitcodes.OK
        assert "[rank1]: rank 1 of 2: x\n" in launched.out
        masks = [int(line.split()[-1], 16) for line in launched.out.splitlines() if "SigIgn" in line]
        assert [mask & STANDARD_SIGNALS for mask in masks] == [0, 0]


def test_rank_that_ends_early_is_waited_for_no_more(tmp_path: Path) -> None:
    """A rank may end with 0 long before the others; the run ends with the last."""
    source = TRAIN + "train(1 if rank == 0 else 60)"
    with Launched(tmp_path, source, TWO) as launched:
        assert launched.wait() == exitcodes.OK
        assert [event["event"] for event in launched.events()] == ["generation_started", "finished"]


def test_run_is_visible_to_others(tmp_path: Path) -> None:
    """run.json, the rank pages and both copies of the events are where the agent looks for them."""
    source = TRAIN + "train(10_000)"
    with Launched(tmp_path, source, TWO) as launched:
        started = launched.event("generation_started")
        launched.until(lambda: len(list(launched.memory.glob("rank-*.page"))) == 2)
        assert launched.state["state"] == "running"
        assert launched.state["launcher_pid"] == launched.process.pid
        assert {entry["rank"] for entry in started["ranks"]} == {0, 1}
        launched.signal(signal.SIGTERM)
        assert launched.wait() == exitcodes.REQUEUE
        assert launched.state["state"] == "finished"
        lines = (launched.memory / "events.jsonl").read_text()
        assert lines == (launched.run / "events.jsonl").read_text() == (tmp_path / "events.jsonl").read_text()
        assert not (launched.memory / "control.sock").exists()


def test_what_ranks_report_is_passed_on(tmp_path: Path) -> None:
    """Committed checkpoints and the rare events of ranks appear in the launcher's stream."""
    source = TRAIN + (
        "reporter.checkpoint_committed(5)\n"
        "time.sleep(0.6)\n"
        "reporter.event('checkpoint_rejected', step=5, file='a.bin', why='checksum', node='?')\n"
        "with open(os.environ['OPSD_RANK_PAGE'] + '.events.jsonl', 'a') as file:\n"
        '    file.write(\'{"event": "odd", "self": 1, "t": NaN}\\n\')\n'
        "time.sleep(0.6)\n"
        "train(30, at=5, do=lambda: reporter.checkpoint_committed(5))"
    )
    with Launched(tmp_path, source) as launched:
        assert launched.wait() == exitcodes.OK
        assert [event["step"] for event in launched.events("checkpoint_committed")] == [5, 5]
        rejected = launched.event("checkpoint_rejected")
        assert (rejected["rank"], rejected["step"], rejected["why"]) == (0, 5, "checksum")
        assert rejected["node"] == launched.event("generation_started")["node"]


def test_control_socket(tmp_path: Path) -> None:
    """The agent can ask for the state, a restart and a stop."""
    with Launched(tmp_path, TRAIN + "train(10_000)", TWO) as launched:
        launched.until(lambda: len(list(launched.memory.glob("rank-*.page"))) == 2)
        assert launched.ask(cmd="status").items() >= launched.state.items()
        assert launched.ask(cmd="restart", reason="straggler") == {"ok": True}
        assert launched.event("resumed")["generation"] == 2
        assert launched.event("restart_requested")["reason"] == "straggler"
        assert launched.ask(cmd="fly")["ok"] is False
        assert launched.ask(cmd="stop") == {"ok": True}
        assert launched.wait() == exitcodes.REQUEUE
        assert launched.event("stopped")["signal"] == "control"


def test_second_launcher_of_a_run_is_refused(tmp_path: Path) -> None:
    """Two launchers cannot share a run; the first goes on undisturbed."""
    with Launched(tmp_path, TRAIN + "train(10_000)") as first:
        first.until(lambda: (first.memory / "rank-0000.page").exists())
        with Launched(tmp_path, TRAIN + "train(10_000)") as second:
            assert second.wait() == exitcodes.USAGE
            assert f"run by process {first.process.pid}" in second.err
        assert first.state["state"] == "running"


@pytest.mark.slow
def test_100_megabytes_of_output(tmp_path: Path) -> None:
    """A rank that prints 100 MB is not slowed down, loses nothing, and the launcher's memory stays small."""
    source = TRAIN + (
        "began = time.monotonic()\n"
        "line = 'x' * 1023 + '\\n'\n"
        "for _ in range(100):\n    sys.stdout.write(line * 1024)\n"
        "sys.stdout.flush()\n"
        "print('seconds', time.monotonic() - began, file=sys.stderr)\n"
        "train(300)"
    )
    with Launched(tmp_path, source) as launched:
        peak = 0
        while launched.process.poll() is None:
            status = Path(f"/proc/{launched.process.pid}/status").read_text()
            peak = max([peak, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))])
        assert launched.wait() == exitcodes.OK
        assert (tmp_path / "out").stat().st_size == 100 << 20
        logs = [path.stat().st_size for path in (launched.run / "logs/gen-0001").glob("rank-0000.log*")]
        assert max(logs) <= 64 << 20
        assert sum(logs) > 100 << 20
        assert float(launched.err.rpartition("seconds ")[2].split()[0]) < 30
        assert 0 < peak < 60 * 1024


def test_help_names_the_exit_codes() -> None:
    """The help is complete without a manual: flags and exit codes."""
    command = [sys.executable, "-m", "opsd", "launch", "--help"]
    text = " ".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    wanted = ("--nproc-per-node", "--max-restarts", "75 stopped in good order", "127 the program")
    assert all(words in text for words in wanted)


# What a program finds and how it ends where people know it from torchrun: names, input, failures at once.


NAMES = "import json, sys\nprint(json.dumps([sys.argv, sys.orig_argv[1:], __file__, sys.path[0], str(sys.flags)]))\n"


@pytest.mark.parametrize("name", ["prog.py", "./prog.py", "sub/../prog.py", "link.py"])
def test_names_are_as_under_python(tmp_path: Path, name: str) -> None:
    """A script finds the names under which it was started, as ``python -u script.py`` would tell it."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "real").mkdir()
    (tmp_path / "real/linked.py").write_text(NAMES)
    (tmp_path / "link.py").symlink_to("real/linked.py")
    with Launched(tmp_path, NAMES, program=(name, "-x", "1")) as launched:
        assert launched.wait() == exitcodes.OK
        command = [sys.executable, "-u", name, "-x", "1"]
        alone = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        assert json.loads(launched.log()) == json.loads(alone)


def test_names_of_a_module_are_as_under_python(tmp_path: Path) -> None:
    """The same for ``python -u -m module``."""
    with Launched(tmp_path, NAMES, "-m", program=("prog", "-x")) as launched:
        assert launched.wait() == exitcodes.OK
        command = [sys.executable, "-u", "-m", "prog", "-x"]
        alone = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        assert json.loads(launched.log()) == json.loads(alone)


def test_the_list_of_processes_names_the_program(tmp_path: Path) -> None:
    """``pgrep -f train.py`` and people who look at ``ps`` find the ranks."""
    source = "print(open('/proc/self/cmdline').read().split('\\0')[-4:-1])"
    with Launched(tmp_path, source, program=("prog.py", "--lr", "1")) as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.log() == "['prog.py', '--lr', '1']\n"


def test_input_reaches_the_program(tmp_path: Path) -> None:
    """Ranks inherit the launcher's standard input, in every generation, and no standby takes any of it."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/greedy.py").write_text("import os\nassert not os.read(0, 100)\n")
    source = "import sys, time\nprint('got', sys.stdin.readline(), end='', flush=True)\ntime.sleep(1000)\n"
    env = {"PYTHONPATH": str(tmp_path / "site-packages")}
    reader, writer = os.pipe()
    with Launched(tmp_path, source, "--standby-import=greedy", stdin=reader, env=env) as launched:
        os.close(reader)
        os.write(writer, b"one\n")
        launched.until(lambda: launched.log() == "got one\n")
        launched.until(lambda: launched.ask(cmd="status")["standby"] == 1)
        os.write(writer, b"two\n")
        os.kill(launched.event("generation_started")["ranks"][0]["pid"], 9)
        launched.until(lambda: launched.log(0, 2) == "got two\n")
        launched.until(lambda: [event["standby"] for event in launched.events("generation_started")] == [0, 1])
        os.close(writer)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        (
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('x')\np.parse_args()",
            "the following arguments",
        ),
        ("open('/no/such/file')", "FileNotFoundError"),
        ("def (", "SyntaxError"),
        ("raise SystemExit('no data')", "no data"),
    ],
)
def test_a_script_that_fails_at_once(tmp_path: Path, source: str, says: str) -> None:
    """It is not started again; the error is seen, and the exit code is torchrun's."""
    with Launched(tmp_path, source, TWO) as launched:
        assert launched.wait() == exitcodes.FAILED
        assert len(launched.events("generation_started")) == 1
        said = launched.log(0) + launched.log(1)  # one of them may be killed before it has said anything
        assert says in said
        assert says in launched.err
        assert "failed as soon as it was started" in launched.event("finished")["reason"]
        assert "opsd/launch" not in said


def test_a_run_that_had_begun_before_is_not_ended_at_once(tmp_path: Path) -> None:
    """A later launcher of the same run, as after a requeue, gives its program the usual second chance."""
    with Launched(tmp_path, "", TWO) as first:
        assert first.wait() == exitcodes.OK
    with Launched(tmp_path, "1 / 0", TWO) as launched:
        assert launched.wait() == exitcodes.REPEATED
        assert "twice soon after its start with the same error, and no step was seen" in launched.err


RECORDED = """
import json, torch, torch.distributed as dist
from pathlib import Path
from torch._C._distributed_c10d import _dump_fr_trace_json
dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(1))
folder = Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"]).parent
print(folder.is_dir(), folder.parent.resolve() == Path(os.environ["OPSD_RUN_DIR"]).resolve())
print("recorded", len(json.loads(_dump_fr_trace_json(True, False))["entries"]))
dist.destroy_process_group()
"""


def test_the_flight_recorder_is_on(tmp_path: Path) -> None:
    """A program that says nothing about it has its collectives recorded, with a place for the dumps."""
    pytest.importorskip("torch", reason="torch is not installed")
    with Launched(tmp_path, "import os\n" + RECORDED) as launched:
        assert launched.wait(120) == exitcodes.OK
        assert launched.log().splitlines() == ["True True", "recorded 3"]


# What ``opsd launch`` cannot start: one sentence and a documented exit code.


TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


@pytest.mark.parametrize(
    ("flags", "program", "code", "says"),
    [
        ((), ("no-such.py",), exitcodes.NOT_FOUND, "there is no file"),
        (("-m",), ("no_such_module",), exitcodes.NOT_FOUND, "there is no module no_such_module"),
        (("-m",), ("xml.no_such",), exitcodes.NOT_FOUND, "there is no module xml.no_such that can be run"),
        (("-m",), ("xml",), exitcodes.NOT_FOUND, "there is no module xml that can be run"),
        (("--no-python",), ("no-such-program",), exitcodes.NOT_FOUND, "there is no program no-such-program"),
        (("--no-python",), ("./prog.py",), exitcodes.NOT_FOUND, "there is no program ./prog.py that can be executed"),
        (("--log-dir=/proc/x",), ("prog.py",), exitcodes.USAGE, "cannot be made"),
        (("--nnodes=2",), ("prog.py",), exitcodes.USAGE, "name them with --nodes"),
        (("--nproc-per-node=0",), ("prog.py",), exitcodes.USAGE, "is not a number of ranks"),
        (("--nproc_per_node=many",), ("prog.py",), exitcodes.USAGE, "is not a number of ranks"),
        (("--tee=9",), ("prog.py",), exitcodes.USAGE, "pairs such as 0:3,1:1"),
        (("--standalone", "--nnodes=2"), ("prog.py",), exitcodes.USAGE, "is for one node"),
        (("--rdzv-endpoint=n1:0", "--nnodes=2"), ("prog.py",), exitcodes.USAGE, "one from 1 to 65535"),
        (("--node-name=../n1",), ("prog.py",), exitcodes.USAGE, "cannot name a node"),
        (("--node-name=.n1",), ("prog.py",), exitcodes.USAGE, "cannot name a node"),
        (("--rdzv-backend=etcd",), ("prog.py",), exitcodes.USAGE, "without etcd"),
        (("-m", "--no-python"), ("prog.py",), exitcodes.USAGE, "exclude each other"),
        (("--events=/proc/x",), ("prog.py",), exitcodes.USAGE, "/proc/x cannot be written"),
        ((TWO, "-m"), ("torch.distributed.run", "prog.py"), exitcodes.USAGE, "each of 2 would train the whole model"),
        ((TWO, "--no-python"), (TORCHRUN, "prog.py"), exitcodes.USAGE, "torchrun starts ranks itself"),
        ((TWO,), (TORCHRUN, "prog.py"), exitcodes.USAGE, "torchrun starts ranks itself"),
        (("--no-such-flag",), ("prog.py",), exitcodes.USAGE, "No such option"),
    ],
)
def test_bad_input(tmp_path: Path, flags: tuple[str, ...], program: tuple[str, ...], code: int, says: str) -> None:
    """What cannot be launched is refused with its exit code and one sentence that says why, without a restart."""
    with Launched(tmp_path, "", *flags, program=program) as launched:
        assert launched.wait() == code
        assert launched.err.count(says) == 1
        assert "Traceback" not in launched.err
        assert launched.err.count("  resume  ") == len(launched.events("generation_started"))
        assert len(launched.events("generation_started")) <= 1


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    """Somebody has removed it below the shell: the paths of the command line mean nothing."""
    within = ("sh", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$@"', "sh")
    with Launched(tmp_path, "", within=within, env={"PYTHONPATH": str(Path(opsd.__file__).parents[1])}) as launched:
        assert launched.wait() == exitcodes.NOT_FOUND
        assert launched.err.splitlines() == ["opsd: the working directory does not exist any more"]


def test_program_that_ends_at_once(tmp_path: Path) -> None:
    """An empty program is a finished run."""
    with Launched(tmp_path, "", TWO) as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.event("finished")["reason"] == "all ranks finished"


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("echo 3 10", "is Python 3.10; ranks need 3.11 or later"),
        ("echo loading... >&2; echo no libpython3.12.so >&2; exit 127", "does not start: no libpython3.12.so"),
        ("kill -SEGV $$", "does not start: exit code -11"),
    ],
)
def test_interpreter_that_cannot_run_ranks(tmp_path: Path, does: str, says: str) -> None:
    """It is refused in a sentence, before there is a run."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{does}\n")
    python.chmod(0o755)
    with Launched(tmp_path, "", env={"PYTHON_EXEC": str(python)}) as launched:
        assert launched.wait() == exitcodes.NOT_FOUND
        assert launched.err == f"opsd: the interpreter {python}, named by PYTHON_EXEC, {says}\n"


def test_interpreter_that_ends_before_it_takes_an_order(tmp_path: Path) -> None:
    """What it ended with is the failure, not the broken channel to it."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ntest $1 = -c && echo 3 11 || exit 5\n")
    python.chmod(0o755)
    with Launched(tmp_path, "", "--nproc-per-node=4", env={"PYTHON_EXEC": str(python)}) as launched:
        assert launched.wait() == exitcodes.FAILED
        assert "with exit code 5" in launched.event("finished")["reason"]


def test_interpreter_that_does_not_exist(tmp_path: Path) -> None:
    """An interpreter for the ranks that is not there is refused like a program that is not there."""
    with Launched(tmp_path, "", env={"PYTHON_EXEC": "/no/such/python"}) as launched:
        assert launched.wait() == exitcodes.NOT_FOUND
        assert "PYTHON_EXEC" in launched.err


# ``opsd launch`` in environments that others have made: those of ``module load``, and of ``conda activate``.


MODULES = Path("/usr/share/modules/init/bash")

FOREIGN = ("click", "httpx", "numpy", "psutil", "pydantic", "pynvml", "rich", "torch", "typing_extensions")
"""Packages of opsd that a module of another Python has as well, in versions that this one cannot import."""

needs_modules = pytest.mark.skipif(not MODULES.exists(), reason="not installed: environment-modules")


@pytest.fixture
def loaded(tmp_path: Path) -> tuple[str, ...]:
    """What a command is run within: a shell that has loaded a module of another Python and its packages."""
    packages = tmp_path / "apps/python/packages"
    packages.mkdir(parents=True)
    for name in FOREIGN:
        (packages / f"{name}.py").write_text(f"raise ImportError('{name} is that of another Python')\n")
    (packages / "site_code.py").write_text("NAME = 'of the site'\n")
    other = tmp_path / "apps/python/bin/python"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\nexit 3\n")
    other.chmod(0o755)
    file = tmp_path / "modulefiles/python/3.6"
    file.parent.mkdir(parents=True)
    file.write_text(
        f"#%Module1.0\nprepend-path PATH {other.parent}\nprepend-path PYTHONPATH {packages}\n"
        f"prepend-path LD_LIBRARY_PATH {packages}\nsetenv PYTHONUNBUFFERED 1\n"
    )
    script = f'. {MODULES} && module use {tmp_path}/modulefiles && module load python/3.6 && exec "$@"'
    return ("bash", "-c", script, "bash")


@needs_modules
def test_a_loaded_module_of_another_python(tmp_path: Path, loaded: tuple[str, ...]) -> None:
    """Its packages come last for opsd, which needs its own, and first for the ranks, as the user has asked for."""
    rank = """
        import site_code, sys
        assert site_code.NAME == "of the site"
        try:
            import click
        except ImportError as error:
            assert "another Python" in str(error)
            print("as loaded")
    """
    with Launched(tmp_path, rank, "--nproc-per-node=2", within=loaded) as launched:
        assert launched.wait() == exitcodes.OK, launched.err
        assert launched.out.count("as loaded") == 2


@needs_modules
@pytest.mark.parametrize(
    "command",
    [
        (str(Path(sys.executable).with_name("opsd")), "--version"),
        (sys.executable, "-m", "opsd", "runbook", "list"),
        (sys.executable, "-X", "dev", "-W", "ignore", "-um", "opsd", "runbook", "list"),
        (sys.executable, "-c", "from opsd.commands.main import main; main()", "runbook", "list"),
        (sys.executable, "-P", "-m", "opsd.launch.run.launchers"),
        (sys.executable, "-u", "-m", "opsd.trainer", "--help"),
    ],
)
def test_each_process_of_opsd_has_its_own_packages(loaded: tuple[str, ...], command: tuple[str, ...]) -> None:
    """The command, however it is called, what it starts, and the trainer."""
    done = subprocess.run([*loaded, *command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@needs_modules
def test_a_program_that_is_called_opsd_has_the_packages_that_the_user_loaded(
    tmp_path: Path, loaded: tuple[str, ...]
) -> None:
    """Its name makes it none of opsd's own processes."""
    program = tmp_path / "opsd"
    program.write_text("import opsd.client\nimport click\n")
    command = [*loaded, sys.executable, "-P", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "click is that of another Python" in done.stderr


def test_an_empty_name_in_pythonpath(tmp_path: Path) -> None:
    """``PYTHONPATH=/apps:$PYTHONPATH`` names the working directory, whose modules come last as well."""
    for name in FOREIGN:
        (tmp_path / f"{name}.py").write_text("raise ImportError('a file of the user')\n")
    command = [Path(sys.executable).with_name("opsd"), "runbook", "list"]
    environ = {**os.environ, "PYTHONPATH": "/apps:"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def conda(tmp_path: Path) -> dict[str, str]:
    """The variables of an activated environment in conda's layout: a whole Python of its own, not a venv."""
    home = tmp_path / "conda/envs/train"
    inner = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}"
    (home / inner / "site-packages").mkdir(parents=True)
    for entry in (Path(sys.base_prefix) / inner).iterdir():
        if entry.name != "site-packages":
            (home / inner / entry.name).symlink_to(entry)
    python = home / "bin/python"
    python.parent.mkdir()
    shutil.copy(Path(sys.executable).resolve(), python)
    ask = "import site, sys; print(sys.prefix); print(site.getsitepackages()[0])"
    said = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=60, check=True)
    prefix, packages = said.stdout.split()
    if prefix != str(home):
        pytest.skip(f"{sys.base_prefix} cannot be copied")
    Path(packages).mkdir(parents=True, exist_ok=True)
    (Path(packages) / "conda_code.py").touch()
    (Path(packages) / "checkout.pth").write_text(str(Path(opsd.__file__).parents[1]))
    return {
        "PATH": f"{python.parent}:{os.environ['PATH']}", "CONDA_PREFIX": str(home), "CONDA_DEFAULT_ENV": "train",
        "CONDA_SHLVL": "2", "CONDA_PREFIX_1": str(tmp_path / "conda"), "VIRTUAL_ENV": "",
    }  # fmt: skip


def test_ranks_run_with_the_python_of_conda(tmp_path: Path, conda: dict[str, str]) -> None:
    """Where opsd is installed elsewhere and PYTHON_EXEC names it; their progress is reported."""
    rank = TRAIN + "import conda_code\nassert sys.prefix == os.environ['CONDA_PREFIX']\ntrain(5)\n"
    with Launched(tmp_path, rank, "--nproc-per-node=2", env=conda | {"PYTHON_EXEC": "python"}) as launched:
        assert launched.wait() == exitcodes.OK, launched.err
        assert "the last is step 4" in launched.err


def test_the_other_python_is_named_when_a_module_is_missing(tmp_path: Path, conda: dict[str, str]) -> None:
    """What is installed in the environment that is active is not there for ranks that run with opsd's Python."""
    with Launched(tmp_path, "import conda_code", env=conda | {"VIRTUAL_ENV": "/left/by/the/shell"}) as launched:
        assert launched.wait() != exitcodes.OK
        assert f"PYTHON_EXEC=python takes that of {conda['CONDA_PREFIX']}" in launched.event("finished")["reason"]


def test_the_other_python_is_named_when_the_program_is_a_module_of_it(tmp_path: Path, conda: dict[str, str]) -> None:
    """``-m`` of what is installed there."""
    with Launched(tmp_path, "", "-m", program=("conda_code",), env=conda) as launched:
        assert launched.wait() == exitcodes.NOT_FOUND
        assert f"PYTHON_EXEC=python takes that of {conda['CONDA_PREFIX']}" in launched.err
