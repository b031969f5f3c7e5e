"""What a program finds and how it ends where people know it from torchrun: names, input, failures at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from opsd import exitcodes
from tests.fakes.launched import Launched

TWO = "--nproc-per-node=2"
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
