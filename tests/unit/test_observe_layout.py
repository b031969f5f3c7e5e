"""A rank's place in the layout, from the meshes and groups of programs that report nothing."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import opsd.client
from opsd.launch.observe.observer import KINDS, Layout, Observer
from opsd.rank_page import read_page

SIZES = st.integers(1, 3)
MEGATRON = {
    "dp": "DATA_PARALLEL_GROUP", "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "tp": "TENSOR_MODEL_PARALLEL_GROUP", "cp": "CONTEXT_PARALLEL_GROUP",
}  # fmt: skip


@given(sizes=st.tuples(SIZES, SIZES, SIZES, SIZES), which=st.floats(0, 0.999))
def test_groups_of_megatron_give_a_rank_its_coordinates(sizes: tuple[int, ...], which: float) -> None:
    """The program makes the groups of all ranks, also those without this one, and groups of its own."""
    places = [dict(zip(MEGATRON, place, strict=True)) for place in product(*map(range, sizes))]
    rank = int(which * len(places))
    layout = Layout(rank, len(places))
    layout.group("", range(len(places)))
    layout.group("EMBEDDING_GROUP", [0, len(places) - 1])
    for kind, description in MEGATRON.items():
        groups: dict[tuple[int, ...], list[int]] = {}
        for other, place in enumerate(places):
            groups.setdefault(tuple(value for name, value in place.items() if name != kind), []).append(other)
        for ranks in groups.values():
            layout.group(description, ranks)
    assert layout.place == places[rank]


@pytest.mark.parametrize(
    ("names", "shape", "at", "place"),
    [
        (("dp", "tp"), (4, 8), (2, 5), (2, 0, 5, 0)),
        (("pp", "dp_replicate", "dp_shard", "cp", "tp"), (2, 2, 2, 2, 2), (1, 1, 0, 1, 0), (2, 1, 0, 1)),
        (("data_parallel", "tensor_parallel"), (16, 2), (7, 1), (7, 0, 1, 0)),
        (("replicate", "shard"), (4, 8), (1, 3), (11, 0, 0, 0)),
    ],
)
def test_named_dimensions_of_a_mesh(
    names: tuple[str, ...], shape: tuple[int, ...], at: tuple[int, ...], place: tuple[int, ...]
) -> None:
    """FSDP with tensor parallelism, torchtitan's five, Lightning's two, hybrid sharding."""
    layout = Layout(0, 32)
    layout.mesh(names, shape, at)
    assert layout.place == dict(zip(KINDS, place, strict=True))


def test_what_is_not_known_tells_nothing() -> None:
    """Experts, meshes of some ranks, dimensions without a name, groups that do not make up all ranks."""
    layout = Layout(3, 8)
    layout.mesh(("dp", "ep"), (4, 2), (1, 1))
    layout.mesh(("dp", "tp"), (2, 2), (1, 1))
    layout.mesh((), (8,), (3,))
    layout.group("TENSOR_MODEL_PARALLEL_GROUP", [2, 3])
    layout.group("PIPELINE_MODEL_PARALLEL_GROUP", [3])
    layout.group("DATA_PARALLEL_GROUP", [1, 3])
    assert layout.place is None


def test_a_mesh_of_one_dimension_does_not_replace_a_richer_one() -> None:
    """FSDP makes a mesh over all ranks beside the program's own."""
    layout = Layout(3, 8)
    layout.mesh(("pp", "dp"), (2, 4), (0, 3))
    layout.mesh(("dp",), (8,), (3,))
    assert layout.place == {"dp": 3, "pp": 0, "tp": 0, "cp": 0}


def test_a_place_that_is_known_before_the_page_is_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are made first, the page comes with the first batch."""
    for name, value in {"OPSD_RANK_PAGE": str(tmp_path / "rank-0001.page"), "RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    observer = Observer(opsd.client)
    observer.begin()
    observer.layout.mesh(("dp", "tp"), (2, 2), (0, 1))
    observer.tell_place()
    assert observer.watches()
    assert read_page(tmp_path / "rank-0001.page").place == (0, 0, 1, 0)
