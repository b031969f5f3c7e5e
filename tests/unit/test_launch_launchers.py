"""Which launchers a run has, what they know in common, and what is said when that cannot be found out."""

from __future__ import annotations

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from opsd.launch.io.handshake import SECRET_FILE, SECRET_VARIABLE, SecretError, job_secret
from opsd.launch.run.launchers import (
    BATCH,
    DEFAULT_PORT,
    NodeCount,
    RendezvousError,
    default_port,
    find_launchers,
    is_single_attempt,
    source_address,
    start_of,
    start_of_job,
    too_many_here,
)


@pytest.mark.parametrize(("text", "least", "most"), [("1", 1, 1), ("48", 48, 48), ("30:32", 30, 32)])
def test_counts_of_nodes(text: str, least: int, most: int) -> None:
    """A number, or torchrun's range."""
    assert NodeCount.parse(text) == NodeCount(least, most)


@pytest.mark.parametrize("text", ["", "0", "3:2", "a", "1:2:3", "-1", ":4"])
def test_what_is_no_count(text: str) -> None:
    """Anything else is refused."""
    with pytest.raises(ValueError):
        NodeCount.parse(text)


def test_nodes_with_addresses() -> None:
    """Names may have the address at which the others reach them."""
    launchers = find_launchers("a=127.0.0.1,b=127.0.0.2", "b", 999, {})
    assert [(member.name, member.address, member.port) for member in launchers.members] == [
        ("a", "127.0.0.1", 999),
        ("b", "127.0.0.2", 999),
    ]
    assert launchers.own is launchers.members[1]


def test_the_nodes_of_a_slurm_job() -> None:
    """A hostlist of any length."""
    job = {"SLURM_JOB_NODELIST": "127.0.0.[1-200]", "SLURM_JOB_ID": "17"}
    launchers = find_launchers("", "127.0.0.7", 999, job)
    assert len(launchers.members) == 200


def test_each_run_of_each_job_has_a_port_of_its_own() -> None:
    """The same on all nodes and in all steps, below those that the kernel gives out; outside of Slurm it is one."""
    ports = [default_port(f"r{run}", {"SLURM_JOB_ID": str(job)}) for job in range(20) for run in range(5)]
    assert len(set(ports)) > 95
    assert all(20_000 <= port < 32_000 for port in ports)
    inside = {"SLURM_JOB_ID": "3", "SLURM_RESTART_COUNT": "2", "SLURM_STEP_ID": "7", "SLURM_NODEID": "1"}
    assert default_port("r2", inside) == default_port("r2", {"SLURM_JOB_ID": "3"})
    assert default_port("r1", {}) == default_port("r2", {}) == DEFAULT_PORT


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, "up to 2 tasks"),
        ({"SLURM_TASKS_PER_NODE": "1,8"}, "up to 8 tasks"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x16)", "SLURM_TASKS_PER_NODE": "8(x16)"}, ""),
        ({}, ""),
    ],
)
def test_a_task_for_each_rank_is_told_from_a_name_taken_twice(environ: dict[str, str], said: str) -> None:
    """Whoever comes from srun's one task for each GPU needs another advice than another name."""
    text = too_many_here(environ)
    assert said in text and ("--ntasks-per-node=1" in text) == bool(said)


def test_cloud_nodes_have_the_addresses_that_slurm_tells() -> None:
    """Nobody resolves their names."""
    job = {"SLURM_JOB_NODELIST": "cloud[1-2]", "SLURM_NODE_ALIASES": "cloud1:127.0.0.8:ip-8,cloud2:[::1]:ip-9"}
    assert [one.address for one in find_launchers("", "cloud1", 999, job).members] == ["127.0.0.8", "::1"]


def test_a_launcher_listens_where_the_others_reach_it() -> None:
    """Not at 127.0.1.1, which is what many a machine's /etc/hosts has for its own name."""
    ways = {"192.0.2.2": "192.0.2.1"}
    launchers = find_launchers("a=127.0.1.1,b=192.0.2.2", "a", 999, {}, ways.__getitem__)
    assert (launchers.own.listens, launchers.own) == ("192.0.2.1", launchers.members[0])
    assert find_launchers("a=127.0.1.1,b=192.0.2.2", "b", 999, {}, ways.__getitem__).own.listens == "192.0.2.2"
    assert source_address("127.0.0.5") == "127.0.0.1"


class NameService:
    """Knows the addresses of some hosts, and which were asked for."""

    def __init__(self, **known: str) -> None:
        self.known = known
        self.asked: list[str] = []

    def __call__(self, host: str) -> str:
        self.asked.append(host)
        if host in self.known:
            return self.known[host]
        raise OSError(errno.ENOENT, "Name or service not known")


@pytest.mark.parametrize(("own", "questions"), [("192.0.2.1", 1), ("2001:db8::1", 1), ("127.0.1.1", 2)])
def test_a_launcher_asks_for_its_own_address_and_not_for_thousands(own: str, questions: int) -> None:
    """And for one other, to see by which address it is reached, if its own name is on loopback."""
    names = NameService(n1=own, n2="192.0.2.2")
    launchers = find_launchers("n[1-4096]", "n1", 999, {}, lambda _: "192.0.2.1", names)
    assert (len(launchers.members), len(names.asked)) == (4096, questions)
    assert launchers.own.listens == own.replace("127.0.1.1", "192.0.2.1")


def test_names_that_another_machine_sees_otherwise_are_the_same_launchers() -> None:
    """Each has its own /etc/hosts: what they know in common are the names as listed."""
    one = find_launchers("n[1-2]", "n1", 999, {}, lambda _: "192.0.2.1", NameService(n1="127.0.1.1", n2="192.0.2.2"))
    two = find_launchers("n[1-2]", "n2", 999, {}, lambda _: "192.0.2.2", NameService(n1="198.51.100.1", n2="192.0.2.2"))
    assert one.members == two.members
    assert start_of("r", {}, one, "x") == start_of("r", {}, two, "y")


def test_one_whose_name_is_on_loopback_does_not_hide_there() -> None:
    """If none of the others can be looked up it cannot know its address; one of them is enough."""
    with pytest.raises(RendezvousError, match=r"n1 is 127\.0\.1\.1 here.*n5 cannot be reached \(Name or service not"):
        find_launchers("n[1-9]", "n1", 999, {}, lambda _: "192.0.2.1", NameService(n1="127.0.1.1"))
    late = NameService(n1="127.0.1.1", n3="192.0.2.3")
    assert find_launchers("n[1-9]", "n1", 999, {}, lambda _: "192.0.2.1", late).own.listens == "192.0.2.1"


def test_a_launcher_that_nobody_could_reach_does_not_start() -> None:
    """Without a network there is no such address."""

    def unreachable(address: str) -> str:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    with pytest.raises(RendezvousError, match=r"a is 127\.0\.1\.1 here.*Network is unreachable.*--nodes a=ADDRESS"):
        find_launchers("a=127.0.1.1,b=192.0.2.2", "a", 999, {}, unreachable)


def test_a_node_from_a_pool_is_borrowed() -> None:
    """It is named on the command line and is none of the job's."""
    job = {"SLURM_JOB_NODELIST": "127.0.0.[1-3]", "SLURM_JOB_ID": "17"}
    assert find_launchers("127.0.0.[1-3],127.0.0.9", "127.0.0.9", 999, job).borrowed
    assert not find_launchers("127.0.0.[1-3],127.0.0.9", "127.0.0.2", 999, job).borrowed
    assert not find_launchers("", "127.0.0.2", 999, job).borrowed
    assert not find_launchers("127.0.0.[1-3]", "127.0.0.2", 999, {}).borrowed


@pytest.mark.parametrize(
    ("nodes", "own", "text"),
    [
        ("", "a", "name them with --nodes"),
        ("n[1-", "n1", "cannot be read"),
        ("a=127.0.0.1", "b", "is not among the nodes of the run"),
        ("no-such-host.invalid", "no-such-host.invalid", "has no address here"),
        ("a..b", "a..b", "this cannot be a host name"),
    ],
)
def test_what_is_missing_is_said(nodes: str, own: str, text: str) -> None:
    """One sentence with what to give."""
    with pytest.raises(RendezvousError, match=text):
        find_launchers(nodes, own, 999, {})


def test_a_start_is_not_the_one_before() -> None:
    """Launchers of an earlier start of the job, or of another job, are told apart; outside of Slurm a run is a run."""
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    starts = {start_of_job("r", env) for env in ({}, job, {**job, "SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "8"})}
    assert len(starts) == 4
    assert start_of_job("r", job) == start_of_job("r", {**job, "SLURM_RESTART_COUNT": "0", "SLURMD_NODENAME": "n2"})


def test_which_starts_come_once() -> None:
    """What ``opsd slurm run`` starts, and a step of several nodes; not what a script starts again and again."""
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert is_single_attempt({**job, BATCH: "ab"})
    assert is_single_attempt({**job, "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_NODES": "2"})
    assert not is_single_attempt({**job, "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_NODES": "1"})
    assert not is_single_attempt({BATCH: "ab"})
    assert start_of_job("r", {**job, BATCH: "ab"}) == "r, job 7.0, ab"


def test_two_steps_of_a_job_are_not_one_start() -> None:
    """If they have the same name: launchers of the one would take part in the other."""
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "127.0.0.[1-2]", "SLURM_STEP_NUM_NODES": "2"}
    launchers = find_launchers("", "127.0.0.1", 999, job)
    starts = [start_of("r", {**job, "SLURM_STEP_ID": str(step)}, launchers, "x") for step in (0, 1)]
    assert starts == ["r, job 7.0, step 0", "r, job 7.0, step 1"]
    assert start_of("r", {**job, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_ID": "3"}, launchers, "x") == "r, job 7.0"


def test_launchers_that_start_together_have_one_secret(tmp_path: Path) -> None:
    """The first launcher makes the file; no other user may read it."""
    with ThreadPoolExecutor(8) as pool:
        secrets = set(pool.map(lambda _: job_secret(tmp_path, {}), range(32)))
    assert len(secrets) == 1
    assert stat.S_IMODE((tmp_path / SECRET_FILE).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [SECRET_FILE]


def test_a_secret_from_the_environment(tmp_path: Path) -> None:
    """Then no file is made."""
    assert job_secret(tmp_path, {SECRET_VARIABLE: "ab" * 32}) == bytes.fromhex("ab" * 32)
    assert not list(tmp_path.iterdir())


def test_secrets_that_are_none(tmp_path: Path) -> None:
    """Too short, readable by others, damaged, or in a folder that cannot be written: said, and never shown."""
    with pytest.raises(SecretError, match="at least 16 bytes"):
        job_secret(tmp_path, {SECRET_VARIABLE: "abcd"})
    job_secret(tmp_path, {})
    (tmp_path / SECRET_FILE).chmod(0o644)
    with pytest.raises(SecretError, match="could be read or made by others"):
        job_secret(tmp_path, {})
    (tmp_path / SECRET_FILE).chmod(0o600)
    os.truncate(tmp_path / SECRET_FILE, 5)
    with pytest.raises(SecretError, match="damaged"):
        job_secret(tmp_path, {})
    with pytest.raises(SecretError, match="cannot be had"):
        job_secret(tmp_path / "absent", {})


def test_a_step_smaller_than_its_job_has_the_steps_nodes() -> None:
    """``srun -N2`` in a job of six: the other four have no launcher. A step of one node is one of several alike."""
    job = {"SLURM_JOB_NODELIST": "127.0.0.[1-6]", "SLURM_JOB_ID": "17"}
    step = {**job, "SLURM_STEP_NODELIST": "127.0.0.[3-4]", "SLURM_STEP_NUM_NODES": "2"}
    assert [member.name for member in find_launchers("", "127.0.0.3", 999, step).members] == ["127.0.0.3", "127.0.0.4"]
    alone = {**job, "SLURM_STEP_NODELIST": "127.0.0.3", "SLURM_STEP_NUM_NODES": "1"}
    assert len(find_launchers("", "127.0.0.3", 999, alone).members) == 6
