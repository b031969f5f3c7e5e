"""Torchrun's command lines, the ranks' environment, and the Python that is active."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from torch.distributed.run import get_args_parser

from opsd.commands.launch import launch
from opsd.commands.launch_options import OPTIONS, parse_endpoint, rdzv_seconds, rendezvous_options
from opsd.launch.ranks.failure import RankError, missing_module
from opsd.launch.ranks.process import launcher_mark
from opsd.launch.ranks.settings import (
    GENERATION_VARIABLES,
    RESTART_VARIABLES,
    Assignment,
    Program,
    Settings,
    flight_recorder,
    gpu_count,
    gpu_of,
    python_with,
    too_few_gpus,
)
from opsd.launch.run.launchers import NodeCount, RendezvousOptions

# torchrun's command lines: every flag, abbreviation and variable is taken, or refused with the way out.


VALUES = {"nnodes": "2", "nproc_per_node": "2", "log_dir": "/tmp/logs", "redirects": "0:1,1:2", "tee": "3"}
"""Values that are taken, where a number is none."""

ONLY = {
    "rdzv_backend": "c10d",
    "rdzv_conf": "timeout=900",
    "start_method": "fork",
    "event_log_handler": "null",
    "duplicate_stdout_filters": "",
    "duplicate_stderr_filters": "",
    "logs_specs": "",
    "numa_binding": "",
    "signals_to_handle": "SIGTERM,SIGUSR1",
}

FLAGS = [action for action in get_args_parser()._actions if action.option_strings and action.dest != "help"]


def parsed(*args: str) -> dict[str, Any]:
    """The options of a command line, as far as click itself sees to them."""
    context = launch.make_context("launch", [*args, "train.py", "--nnodes", "7"])
    assert context.params["program"] == "train.py"
    assert context.params["args"] == ("--nnodes", "7")
    return dict(context.params)


def test_torchruns_options_are_all_known() -> None:
    """A flag that a newer torch has, or no longer has, is named here."""
    theirs = {name.lstrip("-").replace("_", "-") for flag in FLAGS for name in flag.option_strings}
    assert {name for name in theirs if len(name) > 1} == OPTIONS


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.dest)
def test_every_flag_is_taken_as_an_option_and_as_a_variable(
    flag: argparse.Action, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each spelling and ``PET_…`` come to the same; what they come to is not what the flag has by default."""
    value = {**VALUES, **ONLY}.get(flag.dest, "3")
    plain = parsed()
    found = [
        parsed(name) if flag.nargs == 0 else parsed(name, value) if len(name) == 2 else parsed(f"{name}={value}")
        for name in flag.option_strings
    ]
    if type(flag).__name__ in ("env", "check_env"):
        monkeypatch.setenv(f"PET_{flag.dest.upper()}", "1" if flag.nargs == 0 else value)
        found.append(parsed())
    assert all(options == found[0] for options in found)
    assert flag.dest in ONLY or found[0] != plain


def _beginnings() -> list[str]:
    parser = get_args_parser()
    names = {name for flag in FLAGS for name in flag.option_strings if name.startswith("--")}
    beginnings = sorted({name[:length] for name in names for length in range(4, len(name))})
    return [text for text in beginnings if len(parser._get_option_tuples(text)) == 1]


def test_every_abbreviation_means_what_it_means_to_argparse() -> None:
    """Each beginning that torchrun takes is the option that torchrun takes it for."""
    parser = get_args_parser()
    for text in _beginnings():
        flag = parser._get_option_tuples(text)[0][0]
        value = {**VALUES, **ONLY}.get(flag.dest, "3")
        full = parsed(f"--{flag.dest}") if flag.nargs == 0 else parsed(f"--{flag.dest}", value)
        assert (parsed(text) if flag.nargs == 0 else parsed(text, value)) == full, text


def test_abbreviation_that_python_3_11_calls_ambiguous() -> None:
    """``--nproc`` begins two spellings of one option, which newer argparse takes."""
    assert parsed("--nproc", "2") == parsed("--nproc_per_node=2")
    assert parsed("--node", "1") == parsed("--node-rank", "1")


def test_own_options_keep_their_names_and_beginnings() -> None:
    """What torchrun does not have is opsd's, in full or abbreviated."""
    assert parsed("--nodes", "a,b")["nodes"] == "a,b"
    assert parsed("--startup", "9")["startup_limit"] == 9.0
    assert parsed("--run_id", "my run")["run"].startswith("my-run-")


@pytest.mark.parametrize(
    ("option", "value", "fix"),
    [
        ("--rdzv-backend", "etcd-v2", "--rdzv-endpoint HOST:PORT"),
        ("--rdzv-conf", "timeout", "join_timeout=600"),
        ("--event-log-handler", "console", "--events FILE"),
        ("--duplicate-stdout-filters", "apple", "RUN_DIR/logs"),
        ("--duplicate-stderr-filters", "apple", "RUN_DIR/logs"),
        ("--logs-specs", "mine", "RUN_DIR/logs"),
        ("--numa-binding", "node", "numactl"),
        ("--signals-to-handle", "SIGTERM,SIGUSR2", "SIGUSR1"),
        ("--start-method", "thread", "leave it out"),
        ("--nproc-per-node", "xpu", "give the number"),
        ("--redirects", "4", "0:3,1:1"),
        ("--master-port", "0", "range"),
        ("--max-restarts", "-1", "range"),
    ],
)
def test_what_is_not_possible_is_refused_with_the_way_out(option: str, value: str, fix: str) -> None:
    """One sentence says why, and what to write instead."""
    with pytest.raises(click.BadParameter) as refusal:
        parsed(option, value)
    assert fix in refusal.value.message
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize("value", ["0", "1"])
def test_flag_variables_are_numbers(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``PET_STANDALONE=0`` is no, as for torchrun."""
    monkeypatch.setenv("PET_STANDALONE", value)
    assert parsed()["standalone"] is (value == "1")


# -- where nodes meet ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("n1:29500", ("n1", 29500)),
        ("n1.cluster", ("n1.cluster", 1)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("[fe80::1%eth0]:29500", ("fe80::1%eth0", 29500)),
        ("[::1]", ("::1", 1)),
        (" n_1:5 ", ("n_1", 5)),
    ],
)
def test_endpoints(text: str, place: tuple[str, int]) -> None:
    """A host with or without port, and IPv6 in brackets."""
    assert parse_endpoint(text, 1) == place


@pytest.mark.parametrize("text", ["n1:70000", "n1:0", "fe80::1:29500", "http://n1:80", "n:", "n 1", ":29500", "[n]:5"])
def test_bad_endpoints_are_refused_in_a_sentence(text: str) -> None:
    """Ports that do not exist, addresses that can be read two ways, and what is no address."""
    with pytest.raises(click.UsageError, match="meet"):
        parse_endpoint(text, 1)


def place(nnodes: str, **options: Any) -> RendezvousOptions | None:
    """The meeting of a launch with these options of torchrun."""
    default: dict[str, Any] = {
        "backend": "static", "endpoint": "", "master": (None, None), "node_rank": None, "local_address": ""
    }  # fmt: skip
    spares = options.pop("spares", 0)
    return rendezvous_options(NodeCount.parse(nnodes), spares, **(default | options))


def test_c10d_nodes_have_no_ranks() -> None:
    """As for torchrun, whose port it is where none is given."""
    assert place("1:4", backend="c10d", endpoint="n1", node_rank=3) == RendezvousOptions("n1", 29400, 1, 4, None, "")


def test_static_nodes_have_ranks() -> None:
    """The endpoint, or the master's address and port, with the rank that the user gives."""
    expected = RendezvousOptions("n1", 29501, 2, 2, 1, "10.0.0.2")
    options = {"node_rank": 1, "local_address": "10.0.0.2"}
    assert place("2", endpoint="n1:29501", **options) == expected
    assert place("2", master=("n1", 29501), **options) == expected
    assert place("2", master=("fe80::1", None)) == RendezvousOptions("fe80::1", 29500, 2, 2, None, "")


def test_spares_are_expected_as_well() -> None:
    """Nodes that stand by come to the meeting like the others."""
    found = place("2", spares=1, endpoint="n1:5")
    assert found is not None
    assert (found.least, found.most) == (3, 3)


def test_no_meeting() -> None:
    """One node needs none, and several have none if nobody says where."""
    assert place("1", endpoint="localhost:29400") is None
    assert place("2") is None
    assert place("2", backend="c10d", master=("n1", 29500)) is None


def test_node_rank_that_does_not_exist() -> None:
    """Ranks of nodes count from 0."""
    with pytest.raises(click.UsageError, match="counts from 0"):
        place("2", endpoint="n1:5", node_rank=2)


def test_rendezvous_timeouts() -> None:
    """``--rdzv-conf`` says how long nodes are waited for unless opsd's own option does."""
    keys = ("join_timeout", "timeout")
    assert rdzv_seconds(600.0, False, {"join_timeout": "30", "timeout": "9"}, *keys) == 30.0
    assert rdzv_seconds(600.0, False, {"timeout": "900", "is_host": "1"}, *keys) == 900.0
    assert rdzv_seconds(5.0, True, {"timeout": "900"}, *keys) == 5.0
    assert rdzv_seconds(30.0, False, {"last_call_timeout": "0"}, "last_call_timeout", least=0.0) == 0.0
    for text in ("soon", "0.5", "nan", "inf"):
        with pytest.raises(click.BadParameter, match="not a number of seconds from 1 on"):
            rdzv_seconds(600.0, False, {"timeout": text}, *keys)


# The ranks' environment and GPUs.


def settings_of(local_size: int) -> Settings:
    """Those of the run r in job 77, with so many ranks on this node, n1."""
    program = Program("script", "/train.py", (), "python", Path("/"))
    return Settings(program, "r", "77", "n1", local_size, "id")


def test_environment_is_torchruns(tmp_path: Path) -> None:
    """A rank finds every variable that torchrun sets, and opsd's own."""
    place, settings = Assignment(0, 1, 0, 4, 4, "127.0.0.1", 29_501), settings_of(4)
    env = settings.environment(2, tmp_path, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) | settings.generation_environment(
        place, 2, generation=3, restarts=1, error_file=tmp_path / "error.json", page=tmp_path / "page"
    )
    assert env == {
        "CUDA_VISIBLE_DEVICES": "4,5,6,7", "OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "2", "ROLE_WORLD_SIZE": "4", "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501", "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "8", "TORCHELASTIC_RUN_ID": "id", "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"), "OPSD_RANK_PAGE": str(tmp_path / "page"),
        "OPSD_GENERATION": "3", "OPSD_RUN": "r", "OPSD_RUN_DIR": str(tmp_path), "OPSD_JOB": "77", "OPSD_NODE": "n1",
        "OPSD_GPU": "6", "OPSD_AUDIT": "refuse", "OPSD_LAUNCHER": launcher_mark(), **flight_recorder(tmp_path, {}),
    }  # fmt: skip


def test_what_a_generation_tells_is_known(tmp_path: Path) -> None:
    """A standby on a spare node is told which variables it has yet to be told."""
    place = Assignment(0, 1, 0, 1, 1, "127.0.0.1", 29_501)
    env = settings_of(1).generation_environment(
        place, 0, generation=1, restarts=0, error_file=tmp_path / "error.json", page=tmp_path / "page"
    )
    assert env.keys() == GENERATION_VARIABLES > RESTART_VARIABLES


def test_ranks_know_of_a_terminal_that_shows_what_they_print(tmp_path: Path) -> None:
    """Their own stdout is none; the user's word wins."""
    shown = replace(settings_of(1), color=True)
    assert shown.environment(0, tmp_path, {})["OPSD_COLOR"] == "1"
    assert shown.environment(0, tmp_path, {"OPSD_COLOR": ""})["OPSD_COLOR"] == ""


def test_user_settings_win(tmp_path: Path) -> None:
    """What the user has set for the ranks is left alone."""
    env = settings_of(2).environment(0, tmp_path, {"OMP_NUM_THREADS": "7", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"})
    assert env["OMP_NUM_THREADS"] == "7"
    assert env["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "0"
    assert "TORCH_FR_BUFFER_SIZE" not in env, "torch would read it first"
    assert env["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "flight_recorder" / "rank_")
    assert env["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1", "older releases do not by themselves"


@pytest.mark.parametrize(
    ("visible", "local_rank", "gpu"),
    [("0,3", 1, 3), ("GPU-aa,GPU-bb", 0, None), ("", 0, None), ("2", 1, None), (None, 1, 1), (None, 2, None)],
)
def test_gpu_of_a_rank(tmp_path: Path, visible: str | None, local_rank: int, gpu: int | None) -> None:
    """The GPU comes from CUDA_VISIBLE_DEVICES, otherwise from the driver's list of two."""
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "driver/nvidia/gpus" / bus).mkdir(parents=True)
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_of(env, local_rank, str(tmp_path)) == gpu


def test_no_driver_no_gpus(tmp_path: Path) -> None:
    """A node without the driver has no GPUs."""
    assert gpu_count({}, str(tmp_path)) == 0


@pytest.mark.parametrize(("ranks", "visible", "said"), [(2, "0", True), (8, "0,1,2,3", True), (4, "0,1,2,3", False),
                                                        (2, "", False), (1, "0,1", False)])  # fmt: skip
def test_more_ranks_than_gpus_are_said(ranks: int, visible: str, said: bool) -> None:
    """A program without GPUs may have as many ranks as it likes."""
    assert bool(too_few_gpus(ranks, {"CUDA_VISIBLE_DEVICES": visible})) == said


# What the launcher says of another Python that is active.


@pytest.fixture
def active(tmp_path: Path) -> Path:
    """The prefix of an active Python 3.11, with an editable package beside the installed ones."""
    prefix, code = tmp_path / "env", tmp_path / "code"
    for folder in (prefix / "bin", prefix / "lib/python3.11/site-packages/apex", code / "mine"):
        folder.mkdir(parents=True)
    (prefix / "bin/python").symlink_to("/bin/true")
    packages = prefix / "lib/python3.11/site-packages"
    for name in ("one_file.py", "apex/fused.py", "compiled.cpython-311-x86_64-linux-gnu.so"):
        (packages / name).touch()
    (packages / "numpy.libs").mkdir()
    (packages / "__editable__.mine.pth").write_text(f"import sys\n\n{code}\n")
    return prefix


def environ(active: Path, **more: str) -> dict[str, str]:
    return {"PATH": f"/no/such/folder:{active}/bin:/usr/bin", **more}


@pytest.mark.parametrize("module", ["apex", "apex.fused", "one_file", "compiled", "mine"])
def test_a_module_that_the_active_python_has(active: Path, module: str) -> None:
    """The sentence names both Pythons."""
    assert f"PYTHON_EXEC=python takes that of {active}, which has {module}" in python_with(module, environ(active))


@pytest.mark.parametrize("module", ["", "numpy", "apex.other", "utils", "one", "..", "/etc", "**", "a\0b"])
def test_a_module_that_it_has_not(active: Path, module: str) -> None:
    """Another Python would not help, least of all with what names no module: a slip after ``-m``."""
    assert python_with(module, environ(active)) == ""


def test_nothing_is_said_where_it_would_mislead(active: Path) -> None:
    """The ranks have run with it; they were told which; it is first for a variable only; it is too old."""
    assert python_with("apex", environ(active), own=str(active)) == ""
    assert python_with("apex", environ(active, PYTHON_EXEC="/apps/python")) == ""
    assert python_with("apex", {"PATH": "/usr/bin", "VIRTUAL_ENV": str(active), "CONDA_PREFIX": str(active)}) == ""
    (active / "lib/python3.11").rename(active / "lib/python3.9")
    assert python_with("apex", environ(active)) == ""


@pytest.mark.parametrize(
    ("error", "module"),
    [
        (RankError("ModuleNotFoundError", "No module named 'apex.fused'", "train.py:3 in <module>"), "apex.fused"),
        (RankError("ModuleNotFoundError", "No module named 'a.b'; 'a' is not a package", ""), ""),
        (RankError("ModuleNotFoundError", "install apex first", ""), ""),
        (RankError("ImportError", "No module named 'apex'", ""), ""),
        (None, ""),
    ],
)
def test_the_module_that_a_rank_lacks(error: RankError | None, module: str) -> None:
    """It is known from Python's own words."""
    assert missing_module(error) == module
