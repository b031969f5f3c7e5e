"""Which launchers a run has, how unlisted ones find each other, and what runs are called."""

from __future__ import annotations

import errno
import gzip
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from opsd.commands.launch_settings import name_of_nodes, name_of_one_node
from opsd.launch.io.handshake import SECRET_FILE, SECRET_VARIABLE, SecretError, job_secret
from opsd.launch.io.protocol import Member
from opsd.launch.run.launchers import (
    ARRIVALS,
    BATCH,
    BEAT_S,
    DEFAULT_PORT,
    ROSTERS,
    SILENT_S,
    Launchers,
    Meeting,
    NodeCount,
    RendezvousError,
    RendezvousOptions,
    Roster,
    SharedRoster,
    default_port,
    find_launchers,
    is_single_attempt,
    source_address,
    start_of,
    start_of_job,
    too_many_here,
)

# Which launchers a run has, what they know in common, and what is said when that cannot be found out.


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


# Launchers that nobody has listed find each other, and only one of them reads the files of all.


START = "r, at n0:29400"


def member(number: int, port: int = 29_480) -> Member:
    return Member(f"n{number}", f"127.0.0.{number + 1}", port)


def meeting(folder: Path, own: Member, least: int, most: int, last_call_s: float = 0.0) -> Meeting:
    return Meeting(RendezvousOptions("n0", 29_400, least, most, None, ""), folder, own, last_call_s, start=START)


class Nodes:
    """Launchers that take their steps in turn, under a clock of their own."""

    def __init__(self) -> None:
        self.now = 0.0

    def go(self, meetings: Sequence[Meeting], seconds: float) -> list[Launchers | None]:
        """What each has found within ``seconds``; who has found it takes no more steps."""
        found: list[Launchers | None] = [None] * len(meetings)
        until = self.now + seconds
        while self.now < until and None in found:
            found = [known or one.step(self.now) for known, one in zip(found, meetings, strict=True)]
            self.now += BEAT_S
        return found


def test_all_find_the_same_launchers(tmp_path: Path) -> None:
    """Each in the same order, itself among them, with one author of one roster."""
    everybody = [member(number) for number in range(20)]
    found = Nodes().go([meeting(tmp_path, own, 20, 20) for own in everybody], 10)
    assert [known and known.own for known in found] == everybody
    assert {known and known.members for known in found} == {tuple(sorted(everybody, key=lambda one: one.name))}
    assert [path.name for path in (tmp_path / ARRIVALS / ROSTERS).iterdir()] == ["1.json.gz"]


def test_only_the_author_reads_the_files_of_the_others(tmp_path: Path) -> None:
    """The others find everybody without those files."""
    author, other = (meeting(tmp_path, member(number), 2, 2) for number in range(2))
    nodes = Nodes()
    while author.step(nodes.now) is None:
        assert other.step(nodes.now) is None
        nodes.now += BEAT_S
    for path in (tmp_path / ARRIVALS).glob("*.json"):
        path.unlink()
    (found,) = nodes.go([other], 5)
    assert found is not None and found.members == (member(0), member(1))


def test_each_look_for_a_roster_follows_a_change_in_its_folder(tmp_path: Path) -> None:
    """Otherwise an NFS client may show the folder as it was, without the roster that another node has made."""
    author, other = (meeting(tmp_path, member(number), 3, 3) for number in range(2))
    folder = tmp_path / ARRIVALS / ROSTERS
    for one in (author, other, other):
        os.utime(folder, (0, 0))
        assert one.step(0.0) is None
        assert folder.stat().st_mtime != 0


def test_who_takes_over_from_a_silent_author(tmp_path: Path) -> None:
    """One of the others, after ``SILENT_S``; before the author has listed anybody, and after."""
    first, *others = (meeting(tmp_path, member(number), 3, 4, last_call_s=5.0) for number in range(3))
    nodes = Nodes()
    assert first.step(nodes.now) is None
    assert nodes.go(others, SILENT_S + 2) == [None, None], "one is missing"
    others.append(meeting(tmp_path, member(3), 3, 4))
    found = nodes.go(others, 10)
    assert {known and known.members for known in found} == {(member(1), member(2), member(3))}
    assert sorted(path.name for path in (tmp_path / ARRIVALS / ROSTERS).iterdir()) == ["1.json.gz", "2.json.gz"]


def test_a_roster_left_over_is_not_used(tmp_path: Path) -> None:
    """That of an earlier start, whose launchers have ended: those that come find each other, not those of before."""
    nodes = Nodes()
    assert None not in nodes.go([meeting(tmp_path, member(number), 2, 2) for number in range(2)], 10)
    found = nodes.go([meeting(tmp_path, member(number, port=5), 2, 2) for number in (1, 2)], 10)
    assert {known and known.members for known in found} == {(member(1, port=5), member(2, port=5))}


def test_a_roster_with_an_earlier_launcher_of_this_node_is_not_used(tmp_path: Path) -> None:
    """It still beats, as the author lingers: the new launchers of the same nodes make one of their own."""
    nodes = Nodes()
    before = [meeting(tmp_path, member(number), 2, 2) for number in range(2)]
    assert None not in nodes.go(before, 10)
    again = [meeting(tmp_path, member(number, port=5), 2, 2) for number in range(2)]
    assert nodes.go(again, BEAT_S) == [None, None]
    assert before[0].beats, "the author and its presence"
    for beat in before[0].beats[1:]:
        beat()
    found = nodes.go(again, 10)
    assert {known and known.members for known in found} == {(member(0, port=5), member(1, port=5))}


def test_who_comes_late_joins_those_that_were_listed(tmp_path: Path) -> None:
    """While the author lingers, and no generation is claimed yet."""
    nodes = Nodes()
    early = [meeting(tmp_path, member(number), 2, 2) for number in range(2)]
    assert None not in nodes.go(early, 10)
    late = meeting(tmp_path, member(2), 2, 2)
    assert late.step(nodes.now) is None
    for beat in early[0].beats:
        beat()
    found = late.step(nodes.now + BEAT_S)
    assert found is not None and found.members == (member(0), member(1), member(2))


def test_the_last_call_waits_for_more_and_ends(tmp_path: Path) -> None:
    """With the least number there, spares may come until it is over."""
    nodes = Nodes()
    meetings = [meeting(tmp_path, member(number), 2, 4, last_call_s=3.0) for number in range(2)]
    assert nodes.go(meetings, 3.0) == [None, None]
    found = nodes.go(meetings, 5.0)
    assert {known and known.members for known in found} == {(member(0), member(1))}


def roster_of(folder: Path, members: Sequence[Member]) -> Path:
    """The file in which ``members`` are listed."""
    rosters = folder / ROSTERS
    rosters.mkdir(parents=True)
    shared = SharedRoster(folder, members[0])
    assert shared.is_author(0.0)
    shared.write(len(members), members)
    (path,) = rosters.iterdir()
    return path


@pytest.mark.parametrize(
    "members",
    [
        [Member("n9", "10.0.0.9", 1), Member("n10", "10.0.0.9", 2), Member("n2", "10.0.0.2", 1)],
        [Member("a", "fe80::1%eth0", 1), Member("b1", "fe80::2%eth0", 65_535)],
        [Member("n1", "no address", 1), Member("n2", "x[1", 1), Member("n3", "y,z", 1), Member("n4", "", 1)],
    ],
    ids=["order", "IPv6", "unusual"],
)
def test_a_roster_lists_whoever_came(tmp_path: Path, members: list[Member]) -> None:
    """In their order, whatever a user gave as an address."""
    roster = Roster.read(roster_of(tmp_path, members))
    assert roster is not None
    assert roster.members == tuple(members)


def test_a_roster_of_thousands_is_short(tmp_path: Path) -> None:
    """All of them read it at once: at most three bytes for each, which are those of ports that nobody chose."""
    everybody = [Member(f"n{k:05d}", f"10.0.{k >> 8}.{k & 255}", 32_768 + k * 7919 % 28_000) for k in range(4096)]
    path = roster_of(tmp_path, everybody)
    assert path.stat().st_size < 3 * len(everybody)
    roster = Roster.read(path)
    assert roster is not None
    assert roster.members == tuple(everybody)


@pytest.mark.parametrize("damage", ["cut off", "not gzip", "not JSON", "columns of other lengths"])
def test_a_damaged_roster_is_none(tmp_path: Path, damage: str) -> None:
    """Whoever reads it goes on as if it did not change."""
    path = roster_of(tmp_path, [member(0), member(1)])
    whole = path.read_bytes()
    content = {
        "cut off": whole[:-12],
        "not gzip": gzip.decompress(whole),
        "not JSON": gzip.compress(b"{"),
        "columns of other lengths": gzip.compress(gzip.decompress(whole).replace(b"n[0-1]", b"n[0-2]")),
    }[damage]
    assert content != whole
    path.write_bytes(content)
    assert Roster.read(path) is None


# What runs are called: the same on all nodes and over requeues, and never the same for two runs.


JOB = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "4", "SLURM_PROCID": "0"}

CWD = Path("/home/me")

TRAIN = ("script", "train.py", "--lr", "1e-3")


@pytest.mark.parametrize(
    ("env", "rdzv_id", "common", "name"),
    [
        (JOB, None, "", "job-77"),
        (JOB, "77", "n1-29500", "job-77"),
        (JOB, "my exp", "", "job-77-my-exp-"),
        (JOB, None, "n1-29500", "job-77"),
        ({**JOB, "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_NODES": "2"}, None, "", "job-77-step-3"),
        ({**JOB, "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_NODES": "4"}, None, "", "job-77"),
        ({**JOB, "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_NODES": "1"}, None, "", "job-77"),
        ({**JOB, "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "6"}, None, "", "job-70_6"),
        ({}, "456", "n1-29500", "456"),
        ({}, None, "n1.cluster-29500", "n1.cluster-29500"),
        ({}, None, "fe80::1-29500", "fe80-1-29500-"),
        ({}, None, "n1=10.0.0.1,n2", "n1-10.0.0.1-n2-"),
        ({}, None, "", "run-"),
    ],
)
def test_nodes_of_a_run_come_to_the_same_name(env: dict[str, str], rdzv_id: str | None, common: str, name: str) -> None:
    """The job's, a part of it where a step has a part of its nodes, or what torchrun's nodes have in common."""
    found = name_of_nodes(env, rdzv_id, common)
    assert found.startswith(name) if name.endswith("-") else found == name


def test_requeued_job_of_one_node_goes_on() -> None:
    """Neither another node, nor another start, nor GPUs of other numbers make it another run."""
    before = {**JOB, "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1", "SLURMD_NODENAME": "n1"}
    after = {**before, "SLURM_RESTART_COUNT": "1", "CUDA_VISIBLE_DEVICES": "4,5", "SLURMD_NODENAME": "n2"}
    assert name_of_one_node(before, None, CWD, TRAIN) == name_of_one_node(after, None, CWD, TRAIN)


@pytest.mark.parametrize(
    ("env", "rdzv_id", "program"),
    [
        (JOB, None, ("script", "train.py", "--lr", "1e-4")),
        ({**JOB, "SLURM_STEP_ID": "1"}, None, TRAIN),
        ({**JOB, "SLURM_PROCID": "1"}, None, TRAIN),
        ({**JOB, "SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "4,5"}, None, TRAIN),
        ({**JOB, "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "6"}, None, TRAIN),
        ({**JOB, "SLURM_JOB_ID": "78"}, None, TRAIN),
        (JOB, "second", TRAIN),
        ({}, None, TRAIN),
    ],
)
def test_launches_of_one_node_in_a_job_are_different_runs(
    env: dict[str, str], rdzv_id: str | None, program: tuple[str, ...]
) -> None:
    """A sweep has other arguments, steps, tasks, GPUs or rendezvous ids."""
    assert name_of_one_node(env, rdzv_id, CWD, program) != name_of_one_node(JOB, None, CWD, TRAIN)


def test_batch_step_is_no_step() -> None:
    """Releases of Slurm differ in whether the batch script sees a step, with a number far above the real ones."""
    batch = {**JOB, "SLURM_STEP_ID": "4294967291"}
    assert name_of_one_node(batch, None, CWD, TRAIN) == name_of_one_node(JOB, None, CWD, TRAIN)
