"""The test after a remedy, the network measured in pairs, and the return of the node."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest

from opsd import exitcodes
from opsd.preflight.checks import CHECKS
from opsd.preflight.network.rendezvous import port_of
from opsd.repair.pair import Pair
from opsd.repair.release import release
from opsd.repair.repair_plan import NO_HARDWARE
from opsd.repair.retest import Preflight, Retested
from opsd.slurm import node_comment
from opsd.slurm.leaf_paths import note
from opsd.slurm.node_comment import NodeHistory
from opsd.slurm.port import Job, Node, Partition, SlurmDenied, SlurmUnavailable
from opsd.slurm.topology import Topology, parse
from tests.fakes.slurm import FakeSlurm
from tests.fakes.tree import FUSE, silent_mount

# The test after a remedy, by a real preflight.


def test_a_retest_that_could_check_nothing_has_failed(tmp_path: Path) -> None:
    """Unknown is not healthy: none of the checks for the fault applies to this machine, or all are skipped."""
    skip = ("gpu_health",)
    whole = ["--set=agent.node=n1", f"--set=agent.state_dir={tmp_path}"]
    found = Preflight([*whole, f"--set=preflight.skip={_others('numa')}"], "quick", skip)(["gpu_health"])
    assert (found.passed, "none of gpu_health could be run" in found.detail) == (False, True), found
    broken = Preflight(["--set=agent.nonsense=1"], "quick")([])
    assert (broken.passed, "unknown key agent.nonsense" in broken.detail) == (False, True), broken
    assert broken.detail.startswith(NO_HARDWARE)


def test_what_is_not_the_node_s_own_does_not_speak_against_its_hardware(tmp_path: Path) -> None:
    """A server that is away fails the test, as it must; beside it any other check that fails does."""
    own = ["--set=agent.node=n1", f"--set=agent.state_dir={tmp_path}", f"--set=preflight.shared_dir={tmp_path}/away"]
    only = [check.name for check in CHECKS if check.name not in ("storage_shared", "numa", "gpu_inventory")]
    away = Preflight([*own, f"--set=preflight.skip={only}"], "quick")([])
    assert (away.passed, away.detail.startswith(f"{NO_HARDWARE}storage_shared failed: ")) == (False, True), away
    both = Preflight([*own, "--set=preflight.gpus=8", f"--set=preflight.skip={only}"], "quick")([])
    assert "gpu_inventory" in both.detail and not both.detail.startswith(NO_HARDWARE), both


def test_a_retest_that_must_end_takes_its_load_with_it(tmp_path: Path) -> None:
    """Within seconds, not at the end of a profile of hours."""
    here = psutil.Process()
    before = {*here.children(recursive=True)}

    def stop() -> str:
        """Once a check works."""
        loads = {*here.children(recursive=True)} - before
        return "n1 is in service" if any("opsd.preflight.worker" in _command(load) for load in loads) else ""

    own = ["--set=agent.node=n1", f"--set=agent.state_dir={tmp_path}"]
    found = Preflight([*own, f"--set=preflight.skip={_others('cpu')}"], "standard", look_s=0.1)(["cpu"], stop)
    assert found == Retested(False, "preflight standard was stopped: n1 is in service", stopped=True)
    assert not {child for child in here.children(recursive=True) if child.is_running()} - before


def test_the_network_between_two_nodes_is_measured_by_two_halves(tmp_path: Path) -> None:
    """The other one is started as a partner's job does it, which gets the port from the number of that job.

    They meet and measure; how well a machine full of other tests does is not looked at.
    """
    own = ["--set=agent.node=localhost", f"--set=agent.state_dir={tmp_path}"]
    job = os.getpid()
    half = [sys.executable, "-P", "-m", "opsd", "preflight", "network", "--hosts=localhost,n2", "--node=1"]
    with subprocess.Popen([*half, "--rendezvous=localhost"], env={**os.environ, "SLURM_JOB_ID": f"{job}"}) as partner:
        found = Preflight(own, "quick").with_partner(["localhost", "n2"], port_of(job))
        assert partner.wait(60) == exitcodes.OK
    assert not found.detail.startswith(NO_HARDWARE), found


def test_two_nodes_that_do_not_meet_say_nothing_of_the_network(tmp_path: Path) -> None:
    """A firewall, or a partner without torch, is no fault of the network, nor are settings that cannot be read."""
    own = ["--set=agent.node=localhost", f"--set=agent.state_dir={tmp_path}"]
    alone = Preflight(own, "quick", join_s=1.0).with_partner(["localhost", "n2"], port_of(os.getpid() + 1))
    assert not alone.passed
    assert alone.detail.startswith(
        f"{NO_HARDWARE}network_join failed: Nodes that take part: n2 never joined within 1 s"
    )
    broken = Preflight(["--set=agent.nonsense=1"], "quick").with_partner(["localhost", "n2"], 1)
    assert broken.detail.startswith(f"{NO_HARDWARE}preflight network made no report: ")


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _others(name: str) -> list[str]:
    return [check.name for check in CHECKS if check.name != name]


# The network of a node in repair, measured with nodes in service: who is taken, and what is made of what is found.


PASSED = Retested(True, "passed infiniband and preflight standard")

GOOD, BAD = Retested(True, ""), Retested(False, "network_search failed: n1 is slow")

TREE = parse("SwitchName=leaf1 Nodes=n[1,3]\nSwitchName=leaf2 Nodes=n[2,4]\nSwitchName=top Switches=leaf[1-2]\n")

DRAINED = Node("n1", "idle", frozenset({"drain"}), "opsd:nic_failed-1 nic_failed: mlx5_0", "root", 100.0)

PAIR_CHECKS = Partition("checks", ("n1", "n2", "n3", "n4"), 0, "REQUEUE")


class Nodes(FakeSlurm):
    """n1 is in repair, n3 is next to it. Jobs start at once, or are ``slow`` or refused."""

    def __init__(self, *nodes: Node, slow: bool = False, refused: bool = False) -> None:
        super().__init__([DRAINED, *(nodes or [Node(f"n{number}", "idle") for number in (2, 3, 4)])])
        self._partitions = [PAIR_CHECKS]
        self._slow, self._refused = slow, refused
        self.submitted: list[tuple[str, Sequence[str]]] = []

    def submit(self, script: str, options: Sequence[str] = ()) -> int:
        if self._refused:
            raise SlurmDenied("sbatch: error: Access/permission denied")
        self.submitted.append((script, options))
        named = dict(option.removeprefix("--").partition("=")[::2] for option in options)
        state = "pending" if self._slow else "running"
        self.add(90 + len(self.submitted), named["job-name"], named["nodelist"], state)
        return self._jobs[-1].id

    def add(self, number: int, name: str, node: str, state: str = "running") -> None:
        job = Job(number, state, "", "root", "checks", (node,), node, None, None, None, 0, name)
        self._jobs.append(job)

    def cancel(self, job: int) -> None:
        self._jobs = [one for one in self._jobs if one.id != job]

    def named(self) -> list[str]:
        return [job.name for job in self._jobs]


class Halves:
    """What the node finds with each partner; it is with none that is not in ``results``."""

    def __init__(self, results: Mapping[str, Retested]) -> None:
        self._results = results
        self.asked: list[tuple[tuple[str, ...], int]] = []

    def __call__(self, hosts: Sequence[str], port: int, stop: Callable[[], str]) -> Retested:
        self.asked.append((tuple(hosts), port))
        return self._results[hosts[1]]


def pair(slurm: FakeSlurm, half: Callable[[Sequence[str], int, Callable[[], str]], Retested]) -> Pair:
    return Pair(slurm, "n1", "checks", half, lambda: TREE, lambda: 1000.0, lambda _seconds: None)


def test_the_nearest_idle_node_runs_the_other_half() -> None:
    """In a job of its own, all by itself on the node, which has ended when that is measured."""
    slurm, halves = Nodes(), Halves({"n3": GOOD})
    found = pair(slurm, halves)(PASSED, True, str)
    assert found == Retested(True, "passed infiniband and preflight standard, and the network with n3")
    assert (halves.asked, slurm.named()) == ([(("n1", "n3"), port_of(91))], [])
    ((script, options),) = slurm.submitted
    assert {"--nodelist=n3", "--partition=checks", "--exclusive", "--propagate=NONE"} <= {*options}
    words = shlex.split(script.splitlines()[1])
    assert words[1:] == ["-P", "-m", "opsd", "preflight", "network", "--hosts=n1,n3", "--node=1", "--rendezvous=n1"]


def test_a_partner_across_a_bad_way_comes_last() -> None:
    """What it would find says nothing about the node; the way is that of the leaf switches, whoever measured it."""
    slurm = Nodes()
    note(slurm, ("n1", "n2"), TREE.leaf, 900.0, passed=False)
    slurm.set_comment("n3", node_comment.write("", NodeHistory(spare="ready", spare_at=900.0)))
    assert pair(slurm, Halves({"n2": GOOD}))(PASSED, True, str).passed, "there is no other"
    leaves = "SwitchName=leaf1 Nodes=n1\nSwitchName=leaf2 Nodes=n[2-3]\nSwitchName=leaf3 Nodes=n4\n"
    tree = parse(f"{leaves}SwitchName=top Switches=leaf[1-3]\n")
    note(slurm, ("n1", "n3"), tree.leaf, 900.0, passed=False)
    other = replace(pair(slurm, Halves({"n4": GOOD})), topology=lambda: tree)
    assert other(PASSED, True, str).detail.endswith("the network with n4")


def test_a_node_that_no_switch_connects_is_no_partner() -> None:
    """Two that cannot meet would speak against the node; one of which no switch is known may be anywhere."""
    tree = parse("SwitchName=here Nodes=n1\nSwitchName=elsewhere Nodes=n[2-3]\n")
    apart = replace(pair(Nodes(), Halves({"n4": GOOD})), topology=lambda: tree)
    assert apart(PASSED, True, str).detail.endswith("the network with n4")


def test_one_bad_way_of_two_is_the_partner_s() -> None:
    """The node is good with another one; whose way is bad is told."""
    found = pair(Nodes(), Halves({"n3": BAD, "n2": GOOD}))(PASSED, True, str)
    assert found.passed
    assert found.detail.endswith(f"the network with n2; not with n3, whose way is bad: {BAD.detail}")


def test_what_a_good_pair_was_warned_of_is_told() -> None:
    """Slower than before, for instance, which another way can be."""
    found = pair(Nodes(), Halves({"n3": Retested(True, "latency is 40% above the median")}))(PASSED, True, str)
    assert (found.passed, found.detail.endswith("the network with n3 (latency is 40% above the median)")) == (
        True,
        True,
    )


def test_bad_with_two_partners_is_the_node_s() -> None:
    """The test has failed, and both are named."""
    slurm = Nodes()
    found = pair(slurm, Halves({"n3": BAD, "n2": BAD}))(PASSED, False, str)
    assert found == Retested(False, f"the network is bad with n3: {BAD.detail}; n2: {BAD.detail}")
    assert slurm.named() == []


@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize(
    ("slurm", "half", "why"),
    [
        (Nodes(Node("n2", "allocated"), Node("n3", "down")), {}, "no node of partition checks is idle"),
        (Nodes(refused=True), {}, "n3: Slurm: sbatch: error: Access/permission denied; n2: Slurm: sbatch: error"),
        (Nodes(slow=True), {}, "n3: its job has not started within 120 s; n2: its job has not started"),
        (
            Nodes(Node("n3", "idle")),
            {"n3": Retested(False, f"{NO_HARDWARE}torch is not installed in /opt/opsd/bin/python")},
            "n3: torch is not installed in /opt/opsd/bin/python; Slurm: no other node of partition checks is idle",
        ),
    ],
    ids=["nobody", "refused", "slow", "no torch"],
)
def test_a_network_that_nobody_could_measure_is_good_enough_for_faults_of_other_kinds(
    slurm: Nodes, half: Mapping[str, Retested], why: str, needed: bool
) -> None:
    """It is told; for a network card the test could not be made, which has nobody replace it."""
    found = pair(slurm, Halves(half))(PASSED, needed, str)
    assert found.passed is not needed
    assert found.detail.startswith(NO_HARDWARE if needed else f"{PASSED.detail}; the network was not tested: ")
    assert why in found.detail
    assert slurm.named() == []


def test_a_bad_way_without_a_second_opinion_returns_no_node() -> None:
    """Neither does it have one replaced: one of two is bad."""
    found = pair(Nodes(Node("n3", "idle")), Halves({"n3": BAD}))(PASSED, False, str)
    assert (found.passed, found.detail.startswith(f"{NO_HARDWARE}the network is bad with n3: ")) == (False, True)
    assert "no other node could tell whose fault that is" in found.detail


def test_a_partner_that_was_preempted_is_no_bad_way() -> None:
    """Its job gives way to any other; what is measured at its end says nothing."""
    slurm = Nodes(Node("n3", "idle"))

    def half(_hosts: Sequence[str], _port: int, _stop: Callable[[], str]) -> Retested:
        slurm.cancel(91)
        return BAD

    found = pair(slurm, half)(PASSED, False, str)
    assert found.passed
    assert "n3: its job has ended meanwhile" in found.detail


def test_a_node_that_is_somebody_else_s_waits_for_no_partner() -> None:
    """The test makes way, and the job does not stay behind."""
    slurm = Nodes(slow=True)
    found = pair(slurm, Halves({}))(PASSED, True, lambda: "n1 is in service")
    assert found == Retested(False, "the test of the network was stopped: n1 is in service", stopped=True)
    stopped = Retested(False, "preflight network was stopped: n1 is in service", stopped=True)
    assert pair(other := Nodes(), Halves({"n3": stopped}))(PASSED, True, str) == stopped
    assert (slurm.named(), other.named()) == ([], [])


def test_what_a_killed_repair_has_left_is_ended_first() -> None:
    """Only what is of this node: others are repaired at the same time."""
    slurm = Nodes()
    slurm.add(7, "opsd-pair-n1", "n4")
    slurm.add(8, "opsd-pair-n10", "n2")

    def half(_hosts: Sequence[str], _port: int, _stop: Callable[[], str]) -> Retested:
        assert [job.id for job in slurm.jobs()] == [8, 91]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pair(slurm, half)(PASSED, True, str)
    assert slurm.named() == ["opsd-pair-n10"], "also if this one is ended"


def test_names_that_are_none_reach_no_script() -> None:
    """Nor the command line of a preflight."""
    slurm = Nodes()
    odd = replace(pair(slurm, Halves({})), node="n1;reboot")
    assert "'n1;reboot' is no name of a machine" in odd(PASSED, True, str).detail
    assert slurm.submitted == []


def test_without_topology_partition_or_answer_it_says_so() -> None:
    """A node is found without the first; the others are told."""
    slurm = Nodes()
    anywhere = replace(pair(slurm, Halves({"n2": GOOD})), topology=Topology)
    assert "the network with n2" in anywhere(PASSED, True, str).detail
    elsewhere = replace(pair(slurm, Halves({})), partition="none")(PASSED, False, str)
    assert "there is no partition none (repair.pair_partition)" in elsewhere.detail
    slurm.error = SlurmUnavailable("no answer")
    assert pair(slurm, Halves({}))(PASSED, True, str).detail.endswith("was not tested: Slurm: no answer")


# Which job gives a node back that is to be repaired: one whose own launcher says that it has no ranks there.


JOB = Job(7, "running", "", getpass.getuser(), "train", ("n1", "n2", "n3"), "n1", None, None, None, 0, "run")

OTHER_USER = 65_533

LAUNCHER = 4242


@dataclass
class Shrinking(FakeSlurm):
    """Remembers to which nodes a job was reduced."""

    shrunk: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    of_job: dict[str, frozenset[str]] = field(default_factory=lambda: {"1": frozenset({"n1"}), "2": frozenset({"n2"})})

    def __post_init__(self) -> None:
        FakeSlurm.__init__(self, [Node("n2", "allocated", frozenset({"drain"}))])

    def shrink(self, job: int, names: Sequence[str]) -> None:
        self.shrunk.append((job, tuple(names)))

    def steps(self, job: int) -> Mapping[str, frozenset[str]]:
        return self.of_job


@contextmanager
def launcher(root: Path, run: str, job: int, nodes: Sequence[str]) -> Iterator[None]:
    """The folder of a run whose launcher answers that it has ranks on ``nodes``."""
    folder = root / run
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"run": run, "job": str(job), "launcher_pid": LAUNCHER}))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "control.sock"))
        server.listen()

        def serve() -> None:
            with suppress(OSError), server.accept()[0] as connection:  # nobody may ask
                connection.recv(4096)
                connection.sendall(json.dumps({"nodes": list(nodes)}).encode() + b"\n")

        threading.Thread(target=serve, daemon=True).start()
        yield


@pytest.fixture
def proc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The launcher on n2, in the step 7.2."""
    folder = tmp_path_factory.mktemp("proc")
    (folder / str(LAUNCHER)).mkdir()
    (folder / str(LAUNCHER) / "environ").write_bytes(b"LANG=C\0SLURM_JOB_ID=7\0SLURM_STEP_ID=2\0")
    return folder


def test_a_run_that_has_moved_on_gives_its_node_back(tmp_path: Path, proc: Path) -> None:
    """The job is reduced to its other nodes, and goes on."""
    slurm = Shrinking()
    with launcher(tmp_path, "run", 7, ["n1", "n3"]):
        assert release(slurm, "n2", [JOB], tmp_path, proc) == "job 7 goes on without n2, which its run has left"
    assert slurm.shrunk == [(7, ("n1", "n3"))]


def test_a_job_with_another_step_on_the_node_keeps_it(tmp_path: Path, proc: Path) -> None:
    """A server of data or an evaluation, which Slurm would end with the node."""
    slurm = Shrinking(of_job={"2": frozenset({"n2"}), "3": frozenset({"n1", "n2"}), "4": frozenset({"n1"})})
    with launcher(tmp_path, "run", 7, ["n1", "n3"]):
        said = release(slurm, "n2", [JOB], tmp_path, proc)
    assert (said, slurm.shrunk) == ("job 7 keeps n2: its step 3 is not one of the run's launchers", [])


def test_a_launcher_that_cannot_be_told_from_other_steps_keeps_the_node(tmp_path: Path) -> None:
    """In a container its number is another one."""
    slurm = Shrinking()
    with launcher(tmp_path, "run", 7, ["n1", "n3"]):
        assert "keeps n2: its step 2" in release(slurm, "n2", [JOB], tmp_path, tmp_path)
    assert slurm.shrunk == []


@pytest.mark.parametrize(
    ("job", "told", "places"),
    [
        (JOB, 7, ["n1", "n2"]),
        (JOB, 8, ["n1", "n3"]),
        (JOB, 7, []),
        (JOB, 7, ["n1", "n2.cluster"]),
        (replace(JOB, batch_host="n2"), 7, ["n1", "n3"]),
        (replace(JOB, state="suspended"), 7, ["n1", "n3"]),
        (replace(JOB, nodes=("n2",)), 7, ["n1", "n3"]),
        (replace(JOB, user="no-such-user"), 7, ["n1", "n3"]),
    ],
    ids=[
        "has ranks",
        "is another job",
        "does not say",
        "other names",
        "batch host",
        "suspended",
        "only node",
        "unknown user",
    ],
)
def test_all_other_jobs_keep_it(tmp_path: Path, job: Job, told: int, places: Sequence[str]) -> None:
    """Also one whose launcher does not say where it has ranks."""
    slurm = Shrinking()
    with launcher(tmp_path, "run", told, places):
        assert release(slurm, "n2", [job], tmp_path) == ""
    assert slurm.shrunk == []


def test_of_two_runs_in_a_job_both_must_have_left(tmp_path: Path) -> None:
    """A job may have several."""
    slurm = Shrinking()
    with launcher(tmp_path, "a", 7, ["n1"]), launcher(tmp_path, "b", 7, ["n2"]):
        assert release(slurm, "n2", [JOB], tmp_path) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a folder of another user, which needs root")
def test_nobody_speaks_for_another_user_s_job(tmp_path: Path) -> None:
    """A folder in shared memory claims the job, and is somebody else's."""
    slurm = Shrinking()
    with launcher(tmp_path, "run", 7, ["n1", "n3"]):
        os.chown(tmp_path / "run", OTHER_USER, OTHER_USER)
        assert release(slurm, "n2", [JOB], tmp_path) == ""
    assert slurm.shrunk == []


def test_a_link_in_place_of_the_run_s_file_is_not_followed(tmp_path: Path) -> None:
    """It could name a device that acts on being opened by root, such as a watchdog."""
    slurm = Shrinking()
    runs = tmp_path / "runs"
    runs.mkdir()
    with launcher(runs, "run", 7, ["n1", "n3"]):
        (runs / "run/run.json").rename(tmp_path / "elsewhere.json")
        (runs / "run/run.json").symlink_to(tmp_path / "elsewhere.json")
        assert release(slurm, "n2", [JOB], runs) == ""
    assert slurm.shrunk == []


def test_an_environment_without_end_is_not_read_whole(tmp_path: Path, proc: Path) -> None:
    """A user may declare any part of a process's memory its environment (PR_SET_MM in prctl(2))."""
    slurm, runs = Shrinking(), tmp_path / "runs"
    runs.mkdir()
    os.truncate(proc / str(LAUNCHER) / "environ", 1 << 42)
    with launcher(runs, "run", 7, ["n1", "n3"]):
        assert "goes on without n2" in release(slurm, "n2", [JOB], runs, proc)


@pytest.mark.skipif(os.geteuid() != 0 or not FUSE.exists(), reason="needs root and FUSE for a mount")
def test_what_somebody_has_mounted_over_a_run_is_not_waited_for(tmp_path: Path, proc: Path) -> None:
    """The repair of the node would not go on."""
    slurm, runs = Shrinking(), tmp_path / "runs"
    (runs / "silent").mkdir(parents=True)
    said = list[str]()
    with launcher(runs, "run", 7, ["n1", "n3"]), silent_mount(runs / "silent", OTHER_USER):
        work = threading.Thread(target=lambda: said.append(release(slurm, "n2", [JOB], runs, proc)), daemon=True)
        work.start()
        work.join(20)
        assert said == ["job 7 goes on without n2, which its run has left"]
