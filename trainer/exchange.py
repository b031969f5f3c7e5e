"""Staged states in several nodes' memory: which form a whole checkpoint, and the transfer to each rank of its own.

After the loss of a node, or when ranks move to other nodes, a rank's newest state may be in the memory of another node:
of its former node, or of the one that keeps its replica (``opsd.trainer.replica``).
"""

from __future__ import annotations

import ipaddress
import json
import mmap
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from opsd.trainer import memory
from opsd.trainer.replica import Pairing
from opsd.trainer.world import World

_BLOCK = 1 << 26
_ADDRESS_BYTES = 16


@dataclass(frozen=True, slots=True, order=True)
class Save:
    """Identifies one save: ``number`` is ``memory.StateInfo.save``."""

    step: int
    number: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """The state of ``rank`` is sent to it from the memory of the node of rank ``source``."""

    rank: int
    source: int


Held = Sequence[Mapping[int, Save]]
"""For each node, the ranks whose states are in its memory, with their save."""


def newest_whole(held: Held, size: int) -> Save | None:
    """The newest save with the states of all ``size`` ranks present somewhere."""
    of_rank = [{states[rank] for states in held if rank in states} for rank in range(size)]
    return max(set.intersection(*of_rank), default=None)


def plan_transfers(held: Held, local_size: int, size: int, save: Save) -> Iterator[Transfer]:
    """The transfers after which each rank's state in ``save`` is on its node; the ranks of a node share the work."""
    for rank in range(size):
        if held[rank // local_size].get(rank) != save:
            node = next(number for number, states in enumerate(held) if states.get(rank) == save)
            yield Transfer(rank, node * local_size + rank % local_size)


def gather_held(folder: Path | None, world: World, usable: Callable[[memory.StateInfo], bool]) -> list[dict[int, Save]]:
    """The ``usable`` states in the memory of each node; the first rank of a node reads ``folder``."""
    found = [0] * (2 * world.size)
    if folder is not None and world.rank % world.local_size == 0:
        for info in memory.all_infos(folder):
            if info.rank < world.size and usable(info):
                found[2 * info.rank : 2 * info.rank + 2] = info.step, info.save
    rows = world.gather(found)[:: world.local_size]
    return [
        {rank: Save(row[2 * rank], row[2 * rank + 1]) for rank in range(world.size) if row[2 * rank + 1]}
        for row in rows
    ]


def run_transfers(planned: Sequence[Transfer], folder: Path, world: World) -> None:
    """Do this rank's part of the transfers; a state that could not be stored at its destination is missing there."""
    for transfer in planned:
        if world.rank == transfer.source:
            _send(folder, transfer.rank, world.device)
        elif world.rank == transfer.rank:
            _receive(folder, transfer, world.device)


def _send(folder: Path, rank: int, device: torch.device) -> None:
    info = memory.read_info(folder, rank)
    text = json.dumps(asdict(info)).encode() if info else b""
    dist.send(torch.tensor(len(text), device=device), rank)
    if info is None:
        return
    dist.send(torch.tensor(list(text), dtype=torch.uint8, device=device), rank)
    with open(memory.state_path(folder, rank), "rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as state:
        for begin in range(0, info.size, _BLOCK):
            count = min(_BLOCK, info.size - begin)
            block = torch.frombuffer(state, dtype=torch.uint8, count=count, offset=begin)
            dist.send(block.to(device), rank)
            del block  # it keeps the mapping from being closed


def _receive(folder: Path, transfer: Transfer, device: torch.device) -> None:
    length = torch.zeros((), dtype=torch.int64, device=device)
    dist.recv(length, transfer.source)
    if not length.item():
        return
    text = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    dist.recv(text, transfer.source)
    info = memory.StateInfo(**json.loads(bytes(text.tolist())))
    buffer = torch.empty(min(_BLOCK, info.size), dtype=torch.uint8, device=device)
    try:
        memory.forget(folder, transfer.rank)
        descriptor = memory.open_state(folder, transfer.rank, info.size)
    except OSError as error:
        print(f"opsd: there is no room for the state of rank {transfer.rank}: {error.strerror}", file=sys.stderr)
        descriptor = -1
    for begin in range(0, info.size, _BLOCK):
        block = buffer[: min(_BLOCK, info.size - begin)]
        dist.recv(block, transfer.source)
        if descriptor >= 0:
            os.pwrite(descriptor, block.cpu().numpy().data, begin)
    if descriptor >= 0:
        os.close(descriptor)
        memory.write_info(folder, info)


def discard_foreign(folder: Path, world: World) -> None:
    """After a restore, keep in this node's memory only the states of its own ranks and of those it replicates."""
    if world.rank % world.local_size == 0:
        node = world.node_of(world.rank)
        here = {(node + sign) % world.nodes for sign in (-1, 0)}
        memory.keep_only(folder, {rank for rank in range(world.size) if world.node_of(rank) in here})


def pair(world: World, job_secret: str = "") -> Pairing:
    """Agree on which rank sends its states to which: to its neighbour on the next node, the last node's to the first.

    The key that authenticates states is drawn at each start and shared through the process group; if the job has a
    ``job_secret``, it is part of the key.
    """
    host = _own_address(os.environ["MASTER_ADDR"])
    listener = socket.create_server((str(host), 0), family=socket.AF_INET6 if host.version == 6 else socket.AF_INET)
    port = listener.getsockname()[1]
    drawn = [secrets.randbits(62) for _ in range(4)]
    packed = host.packed.ljust(_ADDRESS_BYTES, b"\0")
    rows = world.gather([host.version, port, *packed, *drawn])
    source, target = ((world.rank + sign * world.local_size) % world.size for sign in (-1, 1))
    version, port, *rest = rows[target]
    address = ipaddress.ip_address(bytes(rest[: 16 if version == 6 else 4]))
    key = b"".join(number.to_bytes(8, "big") for number in rows[0][-4:]) + job_secret.encode()
    return Pairing(f"{address} {port}", listener.detach(), source, key.hex())


def _own_address(toward: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """This node's address on the network towards ``toward``."""
    family, kind, protocol, _, address = socket.getaddrinfo(toward, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return ipaddress.ip_address(probe.getsockname()[0])
