"""From one model to a model spread over ranks: joining the world, sharding, initial values, regions of tensors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.config import Config, ConfigError, RunSettings
from trainer.model import Decoder, init_std


@dataclass(frozen=True, slots=True)
class World:
    """This rank's place among the ranks of the run."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def layout(self) -> dict[str, int]:
        """The parallel layout as it is written into checkpoint manifests."""
        return {"dp": self.size}

    def sum(self, values: Sequence[float | torch.Tensor]) -> list[float]:
        """The sums of ``values`` over all ranks, the same bits on each of them; in float64."""
        packed = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in values])
        dist.all_reduce(packed)
        return packed.tolist()

    def from_first(self, value: int) -> int:
        """The first rank's ``value``, an int64, on every rank."""
        packed = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.broadcast(packed, src=0)
        return int(packed.item())

    def least(self, value: int) -> int:
        """The smallest ``value``, an int64, of all ranks."""
        packed = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.all_reduce(packed, op=dist.ReduceOp.MIN)
        return int(packed.item())


@dataclass(frozen=True, slots=True)
class Region:
    """The part of a tensor that this rank holds: ``local`` begins at ``offset`` of a tensor of shape ``shape``."""

    local: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where ``local`` lies in the whole tensor."""
        return tuple(slice(at, at + n) for at, n in zip(self.offset, self.local.shape, strict=True))


def join(settings: RunSettings) -> World:
    """Join the process group that torchrun's variables describe; without them this process is the whole world.

    Raises ConfigError if a GPU is demanded and there is none.
    """
    env = os.environ
    local_rank, local_size = int(env.get("LOCAL_RANK", "0")), int(env.get("LOCAL_WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available() and settings.device != "cpu"
    if settings.device == "cuda" and not cuda:
        raise ConfigError("run.device is cuda, and torch finds no GPU here; set it to auto or cpu")
    if cuda:
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(settings.threads or max(1, len(os.sched_getaffinity(0)) // local_size))
    torch.use_deterministic_algorithms(settings.deterministic)
    torch._C._set_deterministic_fill_uninitialized_memory(False)  # what is empty here is always filled
    backend = "nccl" if cuda else "gloo"
    if "RANK" in env:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    return World(dist.get_rank(), dist.get_world_size(), device, mesh)


def build(config: Config, world: World) -> Decoder:
    """The model with its parameters, gradients and optimiser state spread over the data-parallel ranks (FSDP2)."""
    with torch.device("meta"):
        model = Decoder(config.model)
    policy = MixedPrecisionPolicy()
    if config.model.dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=world.mesh, mp_policy=policy)
    fully_shard(model, mesh=world.mesh, mp_policy=policy)
    model.to_empty(device=world.device)
    initialise(model, config.run.seed)
    return model


@torch.no_grad()
def initialise(model: Decoder, seed: int) -> None:
    """Draw every parameter, the same bits for every layout: from a generator of its own, in full, and keep our part.

    Drawing only the local part would give the ranks of a tensor-parallel group equal shards.
    """
    for name, parameter in model.named_parameters():
        region = region_of(parameter)
        if parameter.dim() == 1:
            region.local.fill_(1.0)
            continue
        key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(region.local.device).manual_seed(int.from_bytes(key, "little") >> 1)
        whole = torch.empty(region.shape, dtype=region.local.dtype, device=region.local.device)
        whole.normal_(0.0, init_std(name, model.settings), generator=generator)
        region.local.copy_(whole[region.slices])


def region_of(tensor: torch.Tensor) -> Region:
    """The local part of a tensor and where it lies; of a plain tensor, the whole."""
    offset: Sequence[int] = (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Region(local_part(tensor), tuple(tensor.shape), tuple(offset))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of ``tensor`` that this rank holds, sharing its memory, without autograd."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
