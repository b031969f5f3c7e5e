"""Hostlists: what Slurm writes for many nodes, and back."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.slurm.hostlist import MAX_HOSTS, HostlistError, compress, compress_in_order, expand

names = st.builds(
    lambda prefix, number, width: f"{prefix}{str(number).zfill(width)}",
    st.sampled_from(["n", "gpu-a", "r1c2-", "x"]),
    st.integers(0, 20_000),
    st.integers(1, 5),
)


@pytest.mark.parametrize(
    ("hostlist", "expected"),
    [
        ("", ()),
        ("login", ("login",)),
        ("n1,n2", ("n1", "n2")),
        ("n[1-3,7]", ("n1", "n2", "n3", "n7")),
        ("n[008-011]", ("n008", "n009", "n010", "n011")),
        ("n[1-2]-ib,n9", ("n1-ib", "n2-ib", "n9")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("n[3],n[1]", ("n3", "n1")),
    ],
)
def test_expands_as_slurm_does(hostlist: str, expected: tuple[str, ...]) -> None:
    """Ranges, padding, several brackets and suffixes give the names that scontrol show hostnames prints."""
    assert expand(hostlist) == expected


@pytest.mark.parametrize(
    "hostlist",
    [
        "n[1-3",
        "n1-3]",
        "n[[1]]",
        "n[]",
        "n[a-b]",
        "n[3-1]",
        "n[1-]",
        "n1,,n2",
        ",n1",
        "n1,",
        "n 1",
        "n/1",
        "n[1-99999999]",
    ],
)
def test_refuses_syntax_errors_in_one_sentence(hostlist: str) -> None:
    """A malformed hostlist is an error that shows it, never a guess."""
    with pytest.raises(HostlistError, match="hostlist") as caught:
        expand(hostlist)
    assert "\n" not in str(caught.value)


def test_refuses_more_hosts_than_slurm_has() -> None:
    """Brackets that multiply do not fill the memory."""
    with pytest.raises(HostlistError, match=str(MAX_HOSTS)):
        expand("r[1-1000]n[1-1000]")


@pytest.mark.parametrize(
    "hostlist",
    [
        f"n[{','.join(['0-65535'] * 120)}]",
        "n" + "[0-65535]" * 100,
        f"n[{'0' * 900}-65535]",
        f"{'n' * 900}[0-65535]",
        ",".join(["n[0-65535]"] * 100),
    ],
    ids=["ranges", "brackets", "digits", "prefix", "items"],
)
def test_a_short_list_does_not_fill_the_memory(hostlist: str) -> None:
    """A user's job name of a thousand characters, with a line like Slurm's, took 600 MiB of the agent."""
    tracemalloc.start()
    try:
        with pytest.raises(HostlistError):
            expand(hostlist)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_ten_thousand_nodes_are_a_few_characters() -> None:
    """A cluster of 10,000 nodes fits into one bracket and comes back whole."""
    nodes = [f"gpu{number:05d}" for number in range(1, 10_001)]
    assert compress(reversed(nodes)) == "gpu[00001-10000]"
    assert expand("gpu[00001-10000]") == tuple(nodes)


def test_compresses_padded_and_plain_numbers_apart() -> None:
    """n1 and n01 are different hosts and stay so."""
    assert compress(["n1", "n01", "n02", "login", "n2", "n2"]) == "login,n[1-2],n[01-02]"
    assert compress(["n099", "n100"]) == "n[099-100]"
    assert compress(["n5"]) == "n5"


@given(st.lists(names, max_size=60))
def test_nothing_is_lost_or_invented(hosts: list[str]) -> None:
    """Expanding a compressed list gives the same set of names, each once."""
    back = expand(compress(hosts))
    assert len(back) == len(set(back))
    assert set(back) == set(hosts)


@given(st.lists(names, max_size=60))
def test_an_order_is_kept(hosts: list[str]) -> None:
    """Expanding gives the same names in the same places, duplicates too."""
    assert expand(compress_in_order(hosts)) == tuple(hosts)


def test_what_counts_up_in_order_is_merged() -> None:
    """Where the width changes a new bracket begins; what counts down is listed one by one."""
    assert compress_in_order(["n8", "n9", "n10", "n11", "login", "n3", "n2"]) == "n[8-9],n[10-11],login,n3,n2"
    assert (
        compress_in_order(f"10.0.{k >> 8}.{k & 255}" for k in range(100, 300))
        == "10.0.0.[100-255],10.0.1.[0-9],10.0.1.[10-43]"
    )
