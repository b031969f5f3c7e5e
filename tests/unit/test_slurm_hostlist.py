"""Hostlists: what Slurm writes for many nodes, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.slurm.hostlist import MAX_HOSTS, HostlistError, compress, expand

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
