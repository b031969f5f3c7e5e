"""The ranks of a run: joining them, this rank's position in the layout, and agreement between ranks."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from opsd.trainer.config import ConfigError
from opsd.trainer.settings import ParallelSettings, RunSettings

_PENDING = torch.iinfo(torch.int64).min
MEET_S = 1.0
STORE_S, STORE_POLL_S = 60.0, 0.01


@dataclass(frozen=True, slots=True)
class World:
    """This rank's position among the ranks of the run.

    The dimensions of ``mesh``, outermost first, are pp, replicate, dp and tp; those of size 1 are missing, dp excepted.
    The ranks that share a sequence (``context``) are neighbours within dp.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    parallel: ParallelSettings
    context: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    """All ranks once more, with expert parallelism: pp, replicate, dp, ep and tp, where dp x ep are dp of ``mesh``."""
    ends: dist.ProcessGroup | None = None
    """The first and the last rank of this rank's pipeline, if it is one of them."""
    peers: dist.ProcessGroup | None = None
    """The ranks of this rank's pipeline stage."""
    local_size: int = 1
    """Ranks on each node; the ranks of a node are neighbours."""

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.size // self.local_size)

    def node_of(self, rank: int) -> int:
        return rank // self.local_size

    @property
    def layout(self) -> dict[str, int]:
        """The parallel layout as in checkpoint manifests; sizes of 1 are left out, dp excepted."""
        settings = self.parallel
        sizes = {"dp": self.data_size, "replicas": settings.replicas, "tp": settings.tp, "pp": settings.pp}
        sizes |= {"cp": settings.cp, "ep": settings.ep}
        return {name: size for name, size in sizes.items() if size > 1 or name == "dp"}

    @property
    def data_size(self) -> int:
        """How many parts the global batch is split into."""
        return self.size // (self.parallel.tp * self.parallel.pp * self.parallel.cp)

    @property
    def data_rank(self) -> int:
        """Which part of the global batch this rank reads."""
        return self.rank // (self.parallel.tp * self.parallel.cp) % self.data_size

    @property
    def stage(self) -> int:
        """This rank's pipeline stage, from 0."""
        return self.rank // (self.size // self.parallel.pp)

    @property
    def place(self) -> dict[str, int]:
        """This rank's coordinates in the layout, as ``Reporter.place`` takes them."""
        tp, cp = self.parallel.tp, self.parallel.cp
        return {"dp": self.data_rank, "pp": self.stage, "tp": self.rank % tp, "cp": self.rank // tp % cp}

    @property
    def sharding(self) -> DeviceMesh:
        """The mesh over which FSDP shards, and with several replicas replicates."""
        if self.parallel.replicas > 1:
            return self.mesh["replicate", "dp"]
        return self.mesh if self.mesh.ndim == 1 else self.mesh["dp"]

    @property
    def whole(self) -> bool:
        """Whether FSDP has only one rank to shard over, so that each layer is whole on it."""
        return self.sharding.size(-1) == 1

    @property
    def tensor(self) -> DeviceMesh | None:
        """The ranks that share each layer's matrices; None if they are not split."""
        return self.mesh["tp"] if self.parallel.tp > 1 else None

    @property
    def expert_split(self) -> DeviceMesh | None:
        """The ranks that share the experts of a layer, or their channels; None if each rank has all."""
        if self.experts is None:
            return self.tensor
        return self.experts["ep", "tp"] if self.parallel.tp > 1 else self.experts["ep"]

    @property
    def expert_sharding(self) -> DeviceMesh:
        """The mesh over which FSDP shards the experts."""
        if self.experts is None:
            return self.sharding
        return self.experts["replicate", "dp"] if self.parallel.replicas > 1 else self.experts["dp"]

    def sum(self, values: Sequence[float | torch.Tensor]) -> list[float]:
        """The sums of ``values`` over all ranks in float64, bit-identical on all ranks; tensors are flattened."""
        packed = torch.cat([
            torch.as_tensor(value, dtype=torch.float64, device=self.device).flatten() for value in values
        ])  # fmt: skip
        dist.all_reduce(packed)
        return packed.tolist()

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """The ``values``, int64 and equally many on each rank, of all ranks in order."""
        mine = torch.tensor(values, dtype=torch.int64, device=self.device)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine)
        return [values.tolist() for values in gathered]

    def from_first(self, value: int) -> int:
        """The first rank's ``value``, an int64, on every rank."""
        packed = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.broadcast(packed, src=0)
        return int(packed.item())

    def once_first_has(self, poll: Callable[[], int | None]) -> int:
        """The value of ``poll`` on the first rank, an int64, once it is not None; without a limit.

        The ranks synchronise every second meanwhile: a single collective would hit its timeout, 10 minutes with NCCL.
        """
        while True:
            value = poll() if self.rank == 0 else None
            if (found := self.from_first(_PENDING if value is None else value)) != _PENDING:
                return found
            time.sleep(MEET_S)

    def least(self, value: int) -> int:
        """The smallest ``value``, an int64, of all ranks."""
        packed = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.all_reduce(packed, op=dist.ReduceOp.MIN)
        return int(packed.item())


def await_store(address: str, port: int, limit_s: float = STORE_S) -> None:
    """Wait until the first rank listens, or for ``limit_s``.

    torch's own client, once refused, waits half a second before its next attempt: a quarter of a swap's time.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=1.0).close()
        except OSError:
            time.sleep(STORE_POLL_S)
        else:
            return


def gpu_here(
    run: RunSettings, environ: Mapping[str, str] = os.environ, cuda: ModuleType = torch.cuda
) -> tuple[int, int] | None:
    """The compute capability of this rank's GPU, None if it computes on the CPU.

    Raises ConfigError if a required GPU is missing.
    """
    if cuda.is_available() and run.device != "cpu":
        capability: tuple[int, int] = cuda.get_device_capability(int(environ.get("LOCAL_RANK", "0")))
        return capability
    if run.device == "cuda":
        raise ConfigError("run.device is cuda, and torch finds no GPU here; set it to auto or cpu")
    return None


def join(run: RunSettings, parallel: ParallelSettings, environ: Mapping[str, str] = os.environ) -> World:
    """Join the process group that torchrun's variables describe; without them this process is the only rank.

    Raises ConfigError if a required GPU is missing, or if the layout does not divide the world.
    """
    rank, size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    local_rank, local_size = int(environ.get("LOCAL_RANK", "0")), int(environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda = gpu_here(run, environ) is not None
    dims = mesh_shape(size, parallel)
    if cuda:
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(run.threads or max(1, len(os.sched_getaffinity(0)) // local_size))
    torch.use_deterministic_algorithms(run.deterministic)
    torch._C._set_deterministic_fill_uninitialized_memory(False)  # what is empty here is always filled
    backend = "nccl" if cuda else "gloo"
    if "RANK" in environ:
        if rank > 0:
            await_store(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    mesh = init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    context = None
    if parallel.cp > 1:
        shape = (size // (parallel.cp * parallel.tp), parallel.cp, parallel.tp)
        context = init_device_mesh(device.type, shape, mesh_dim_names=("rest", "cp", "tp"))["cp"]
    experts = None
    if parallel.ep > 1:
        sizes = dims | {"dp": dims["dp"] // parallel.ep, "ep": parallel.ep}
        order = [name for name in ("pp", "replicate", "dp", "ep", "tp") if name in sizes]
        experts = init_device_mesh(device.type, tuple(sizes[name] for name in order), mesh_dim_names=tuple(order))
    ends = _join_ends(rank, size, parallel.pp) if parallel.pp > 1 else None
    peers = dist.group.WORLD
    if parallel.pp > 1:
        stages = torch.arange(size).view(parallel.pp, -1).tolist()
        peers, _ = dist.new_subgroups_by_enumeration(stages)  # type: ignore[no-untyped-call]
    return World(rank, size, device, mesh, parallel, context, experts, ends, peers, local_size)


def _join_ends(rank: int, size: int, stages: int) -> dist.ProcessGroup | None:
    per_stage, mine = size // stages, None
    for first in range(per_stage):
        pair = [first, size - per_stage + first]
        group = dist.new_group(pair)
        if rank in pair:
            mine = group
    return mine


def mesh_shape(size: int, parallel: ParallelSettings) -> dict[str, int]:
    """The sizes of the mesh's dimensions for ``size`` ranks. Raises ConfigError if the layout does not divide them."""
    factors = {"replicas": parallel.replicas, "tp": parallel.tp, "pp": parallel.pp, "cp": parallel.cp}
    smallest = math.prod(factors.values())
    if size % smallest:
        product = " x ".join(f"parallel.{name} {factor}" for name, factor in factors.items() if factor > 1)
        raise ConfigError(f"{size} ranks are not a multiple of {product}; start a multiple of {smallest} ranks")
    dp = size // (parallel.pp * parallel.replicas * parallel.tp)
    if dp % parallel.ep:
        multiple = smallest * (parallel.ep // math.gcd(parallel.cp, parallel.ep))
        raise ConfigError(
            f"{size} ranks do not split into parallel.ep {parallel.ep}; start a multiple of {multiple} ranks"
        )
    dims = {"pp": parallel.pp, "replicate": parallel.replicas, "dp": dp, "tp": parallel.tp}
    return {name: length for name, length in dims.items() if length > 1 or name == "dp"}
