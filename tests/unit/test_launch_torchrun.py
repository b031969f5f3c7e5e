"""torchrun's command lines: every flag, abbreviation and variable is taken, or refused with the way out."""

from __future__ import annotations

import argparse
from typing import Any

import click
import pytest
from torch.distributed.run import get_args_parser

from opsd.commands.launch import launch
from opsd.commands.launch_options import OPTIONS, parse_endpoint, rdzv_seconds, rendezvous_options
from opsd.launch.run.launchers import NodeCount
from opsd.launch.run.rendezvous import RendezvousOptions

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
