"""The switch tree from what ibnetdiscover prints: names, rails, levels, and whatever else may stand there."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from opsd import exitcodes
from opsd.commands.nodes import nodes
from opsd.commands.settings import BadConfig
from opsd.slurm.fabric import parse, tree
from opsd.slurm.topology import Topology, TopologyError, text
from opsd.slurm.topology import parse as parse_conf
from opsd.slurm.topology_source import read
from tests.fakes.fabric import RAILS, printed


def test_nodes_with_the_same_rails_are_one_place() -> None:
    """Each has four adapters on four leaf switches; the spines, which all of them reach, are one switch above."""
    found = tree(parse(RAILS))
    assert text(found) == (
        "SwitchName=su1-leaf1_and_3_more Nodes=gpu[01-03]\n"
        "SwitchName=su2-leaf1_and_3_more Nodes=gpu[04-06]\n"
        "SwitchName=spine1_and_1_more Switches=su1-leaf1_and_3_more,su2-leaf1_and_3_more\n"
    )
    assert parse_conf(text(found)) == found
    assert (found.hops("gpu01", "gpu03"), found.hops("gpu01", "gpu04")) == (1, 3)


def test_a_node_that_lacks_a_rail_stays_with_its_neighbours() -> None:
    """A port that is down is no reason for a place of its own."""
    lines = [line for line in RAILS.splitlines() if '# "gpu02 mlx5_3"' not in line]
    assert tree(parse("\n".join(lines))) == tree(parse(RAILS))


def test_a_node_on_two_leaf_switches_makes_them_no_neighbours() -> None:
    """A login node on a leaf of each of two pods is beside the nodes of one; leaves and pods stay as far as they are.

    What only such a node connects, as two subnets, stays connected, but is not near.
    """
    described = {f"S-a{number}": f"leaf{number}" for number in range(4)} | {"S-b0": "b0", "S-b1": "b1", "S-c": "core"}
    described |= {f"H-{number}": f"n{number} mlx5_0" for number in range(8)}
    described |= {f"H-login{port}": f"login mlx5_{port}" for port in range(2)}
    links = [(f"H-{number}", f"S-a{number // 2}") for number in range(8)]
    links += [("H-login0", "S-a0"), ("H-login1", "S-a3")]
    apart = tree(parse(printed(links, described)))
    assert [apart.hops("n0", other) for other in ("n1", "n6", "n2")] == [1, 3, None]
    links += [(f"S-a{number}", f"S-b{number // 2}") for number in range(4)] + [("S-b0", "S-c"), ("S-b1", "S-c")]
    found = tree(parse(printed(links, described)))
    assert [found.hops("n0", other) for other in ("login", "n1", "n2", "n6")] == [1, 1, 3, 5]
    assert found.switches("n6") == ("leaf3", "b1", "core")


@pytest.mark.parametrize("storage", [False, True])
def test_one_other_switch_of_many_makes_no_other_place(storage: bool) -> None:
    """A cable in a leaf of another pod, or adapters for storage on leaves of their own, which split no unit in two."""
    described = {f"S-{unit}{rail}": f"u{unit}r{rail}" for unit in range(2) for rail in range(4)}
    described |= {f"S-p{unit}": f"pod{unit}" for unit in range(2)} | {"S-c": "core", "S-s0": "st0", "S-s1": "st1"}
    links = [(f"S-{unit}{rail}", f"S-p{unit}") for unit in range(2) for rail in range(4)]
    links += [("S-p0", "S-c"), ("S-p1", "S-c"), ("S-s0", "S-c"), ("S-s1", "S-c")]
    for node, rail in product(range(8), range(4)):
        wrong = not storage and (node, rail) == (0, 3)
        described[f"H-{node}{rail}"] = f"n{node} mlx5_{rail}"
        links.append((f"H-{node}{rail}", f"S-{1 if wrong else node // 4}{rail}"))
    if storage:
        described |= {f"H-{node}4": f"n{node} mlx5_4" for node in range(4)}
        links += [(f"H-{node}4", f"S-s{node // 2}") for node in range(4)]
    found = tree(parse(printed(links, described)))
    assert [found.hops("n0", other) for other in ("n1", "n3", "n4")] == [1, 1, 5]


def test_pods_below_a_core_are_levels() -> None:
    """Three of them; a switch that only storage hangs from, and one without anything, are none."""
    described = {f"S-a{number}": f"MF0;leaf{number}:MQM8700/U1" for number in range(4)}
    described |= {"S-b0": "MF0;spine0:MQM8700/U1", "S-b1": "MF0;spine1:MQM8700/U1", "S-c": "core", "S-d": "storage"}
    described |= {f"H-{number}": f"n{number} HCA-1" for number in range(8)} | {"H-e": "nas HCA-1"}
    links = [(f"H-{number}", f"S-a{number // 2}") for number in range(8)]
    links += [("S-a0", "S-b0"), ("S-a1", "S-b0"), ("S-a2", "S-b1"), ("S-a3", "S-b1"), ("S-b0", "S-c"), ("S-b1", "S-c")]
    links += [("H-e", "S-d"), ("S-d", "S-c")]
    found = tree(parse(printed(links, described)), [f"n{number}" for number in range(8)])
    assert [found.hops("n0", other) for other in ("n1", "n2", "n4")] == [1, 3, 5]
    assert found.switches("n0") == ("leaf0", "spine0", "core")


@pytest.mark.parametrize(
    ("described", "names", "nodes"),
    [
        ("node018 HCA-1", [], ["node018"]),
        ("tj01-4090-node005 mlx5_2", [], ["tj01-4090-node005"]),
        ("gpu01.cluster.example mlx5_0", ["gpu01"], ["gpu01"]),
        ("GPU01 mlx5_ib0", ["gpu01"], ["gpu01"]),
        ("gpu01", ["gpu01"], ["gpu01"]),
        ("gpu01 mlx5_0", ["gpu01.one.example", "gpu02.one.example"], ["gpu01.one.example"]),
        ("gpu01 mlx5_0", ["gpu01.one.example", "gpu01.other.example"], []),
        ("gpu01.other.example mlx5_0", ["gpu01.one.example"], []),
        ("login01 HCA-1", ["gpu01"], []),
        ("MT4129 ConnectX7   Mellanox Technologies", [], []),
        ("Mellanox Technologies Aggregation Node", [], []),
        ("", [], []),
    ],
)
def test_the_node_of_an_adapter_is_in_its_description(described: str, names: list[str], nodes: list[str]) -> None:
    """Slurm's nodes if they are known; what the firmware says, and what is within a switch, is none."""
    found = parse(printed([("H-1", "S-1")], {"S-1": "leaf", "H-1": described}))
    assert [*tree(found, names).leaf] == nodes
    hosts = [] if nodes or not described.endswith(("mlx5_0", "HCA-1")) else [described.split()[0]]
    assert found.others(names) == (hosts, [described] if described.startswith("MT") or not described else [])


def test_switches_without_a_name_of_their_own_have_that_of_their_id() -> None:
    """Those of the firmware, and the units of a director, which share one. Linked leaves are connected."""
    described = {
        "S-1": "SwitchIB Mellanox Technologies",
        "S-2": "MF0;dir 1:CS8500/L1/U1",
        "S-3": "MF0;dir 1:CS8500/L2/U1",
    }
    described |= {f"H-{number}": f"n{number} HCA-1" for number in range(1, 4)}
    links = [("H-1", "S-1"), ("H-2", "S-2"), ("H-3", "S-3"), ("S-1", "S-2"), ("S-2", "S-3")]
    found = tree(parse(printed(links, described)))
    assert found.leaf == {"n1": "switch-1", "n2": "dir_1-2", "n3": "dir_1-3"}
    assert found.hops("n1", "n3") == 3


def test_no_switch_has_a_longer_name_than_slurm_takes() -> None:
    """It is called by its id then; two units of one director, and of long names, stay two."""
    long = "MF0;hall-3-row-12-rack-07-compute-infiniband-leaf:Q3400_RA/U{}"
    described = {f"S-5c2573030076{unit:04}": long.format(unit) for unit in range(4)}
    described |= {f"H-{node}": f"n{node} mlx5_0" for node in range(4)}
    links = [
        (f"H-{node}", f"S-5c2573030076{unit:04}") for node in range(4) for unit in (node // 2 * 2, node // 2 * 2 + 1)
    ]
    found = tree(parse(printed([*links, ("S-5c25730300760000", "S-5c25730300760002")], described)))
    assert {*found.leaf.values()} == {"switch-5c25730300760000_and_1_more", "switch-5c25730300760002_and_1_more"}
    assert max(map(len, found.nodes)) <= 64


@given(st.text() | st.lists(st.sampled_from([*RAILS.splitlines(), "Switch 1", '[1] "S-', '"'])).map("\n".join))
def test_any_text_is_a_fabric_or_one_sentence(anything: str) -> None:
    """Also a part of a fabric; what can be made of it can be read back."""
    try:
        found = tree(parse(anything))
    except TopologyError as error:
        assert "\n" not in str(error)
    else:
        assert parse_conf(text(found)) == found


SWITCHES, HOSTS = st.integers(0, 7), st.integers(0, 9)


@given(st.sets(st.tuples(SWITCHES, SWITCHES)), st.sets(st.tuples(HOSTS, SWITCHES)), st.booleans())
def test_nodes_are_connected_in_the_tree_as_in_the_fabric(up, down, named) -> None:
    """However switches are linked: in rings, in one level or in many, with names or without."""
    described = {f"S-{one}": f"s{one}" if named else "SwitchIB Mellanox Technologies" for one in range(8)}
    described |= {f"H-{host}{rail}": f"n{host} mlx5_{rail}" for host, rail in down}
    links = [(f"S-{one}", f"S-{other}") for one, other in up if one != other]
    found = tree(parse(printed([*links, *((f"H-{host}{rail}", f"S-{rail}") for host, rail in down)], described)))
    assert {*found.leaf} == {f"n{host}" for host, _ in down}
    assert parse_conf(text(found)) == found
    groups = {one: {one} for one in described}
    joins = [*links, *((f"H-{host}{rail}", f"S-{rail}") for host, rail in down)]
    joins += [(f"H-{host}{one}", f"H-{host}{other}") for host, one in down for at, other in down if at == host]
    for one, other in joins:
        whole = groups[one] | groups[other]
        groups |= dict.fromkeys(whole, whole)
    for host, rail in down:
        for other, other_rail in down:
            connected = f"H-{other}{other_rail}" in groups[f"H-{host}{rail}"]
            assert (found.hops(f"n{host}", f"n{other}") is not None) == connected


def test_the_file_counts_where_slurm_has_no_switches(tmp_path: Path) -> None:
    """Slurm's blocks stay domains; where Slurm has switches its own count, and what contradicts them is said."""
    own, file, said = tmp_path / "topology.conf", tmp_path / "measured.conf", list[str]()
    (tmp_path / "slurm.conf").touch()
    environ = {"SLURM_CONF": str(tmp_path / "slurm.conf")}

    def now() -> Topology:
        return read(environ=environ, measured=file, say=said.append)

    assert now() == Topology()
    file.write_text("SwitchName=s1 Nodes=n[1-2]\nSwitchName=s2 Nodes=n[3-4]\nSwitchName=top Switches=s[1-2]\n")
    assert now().hops("n1", "n3") == 3
    own.write_text("BlockName=b1 Nodes=n[1-4]\nBlockSizes=4\n")
    assert (now().hops("n1", "n3"), now().domain["n3"]) == (3, "b1")
    own.write_text("SwitchName=x Nodes=n[1-2]\nSwitchName=y Nodes=n[3-5]\n")
    assert (now().leaf["n1"], said) == ("x", [])
    own.write_text("SwitchName=x Nodes=n[1-3]\n")
    assert now().leaf == dict.fromkeys(("n1", "n2", "n3"), "x")
    assert said[-1].endswith("which counts: n1 and n3 are below one leaf switch in Slurm's and below two in the file")
    file.write_text("SwitchName=s1 Nodes=n[1-\n")
    assert now().leaf["n1"] == "x"
    assert said[-1].endswith("; Slurm's topology counts")
    environ["OPSD_TOPOLOGY"] = str(tmp_path / "none.conf")
    own.unlink()
    with pytest.raises(TopologyError, match=r"none.conf cannot be read"):
        now()


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """The one there stays if there is no fabric, nor any node in it, and where it cannot be written that is said."""
    kept = tmp_path / "topology.conf"
    kept.write_text("before")
    command = ["topology", f"--output={kept}"]
    for given_text, code, sentence in (
        ("", exitcodes.USAGE, "there is no switch in it"),
        (RAILS[: RAILS.rindex("Switch")], exitcodes.USAGE, "it is cut short: "),
        (RAILS[: RAILS.rindex("Ca")], exitcodes.USAGE, "has no block of its own"),
        (printed([("H-1", "S-1")], {"S-1": "leaf", "H-1": "MT4129 ConnectX7"}), exitcodes.FAILED, "'MT4129 ConnectX7'"),
    ):
        done = CliRunner().invoke(nodes, command, input=given_text, standalone_mode=False)
        assert sentence in (done.stderr or str(done.exception))
        assert isinstance(done.exception, BadConfig) if code == exitcodes.USAGE else done.return_value == code
        assert kept.read_text() == "before"
    assert CliRunner().invoke(nodes, command, input=RAILS).exit_code == exitcodes.OK
    assert parse_conf(kept.read_text()) == tree(parse(RAILS))
    before = os.umask(0o077)
    try:
        assert "cannot be read by all" in CliRunner().invoke(nodes, command, input=RAILS).stderr
    finally:
        os.umask(before)
    assert "cannot be read by all" not in CliRunner().invoke(nodes, command, input=RAILS).stderr
    nowhere = CliRunner().invoke(nodes, ["topology", f"--output={tmp_path}/none/x"], input=RAILS, standalone_mode=False)
    assert "the topology could not be written" in nowhere.stderr
