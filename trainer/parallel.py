"""Builds the parallel model for a layout: the only module that knows how a model is spread over ranks.

It uses torch's own components. A pipeline stage has some of the layers. Within it tensor parallelism splits each
layer's matrices and, between them, the sequence (DTensor). Layers are recomputed and compiled as configured. FSDP
shards the rest over data-parallel and context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Final, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from opsd import pip_install
from opsd.trainer.attention import FAST_KERNELS, LatentAttention
from opsd.trainer.config import Config, ConfigError
from opsd.trainer.counts import stage_ranges
from opsd.trainer.experts import GroupedLinear, Networks
from opsd.trainer.loss import linear_loss, part_loss
from opsd.trainer.model import Block, Decoder
from opsd.trainer.recurrent import Mamba, Recurrent
from opsd.trainer.regions import initialise
from opsd.trainer.settings import ParallelSettings
from opsd.trainer.world import World

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.higher_order.flex_attention,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
}
"""Operations whose results selective recomputation keeps: those expensive to compute or communicate again."""


_LEAST: Final = {"flex": (0, 0), "varlen": FAST_KERNELS, "fp8": (8, 9)}
"""The compute capability of a GPU that has the kernels; 8.0 is A100, 8.9 is L40, 9.0 is H100."""


def demand_device(config: Config, gpu: tuple[int, int] | None) -> None:
    """Raises ConfigError for kernels that this device has not; ``gpu`` is its compute capability, None is the CPU.

    The CPU computes products in float8 step by step.
    """
    kernel = config.model.attention
    if kernel in _LEAST and gpu is None:
        raise ConfigError(f"model.attention {kernel} needs a GPU, and this run is on the CPU; set it to auto or sdpa")
    for key, name, instead in (
        (f"model.attention {kernel}", kernel, "set it to auto"),
        ("parallel.fp8", "fp8" if config.parallel.fp8 else "", "set it to false"),
    ):
        if gpu is not None and name in _LEAST and gpu < (least := _LEAST[name]):
            here, needed = ("{}.{}".format(*each) for each in (gpu, least))
            raise ConfigError(
                f"{key} needs a GPU of compute capability {needed} or more, this one has {here}; {instead}"
            )


def demand_libraries(settings: ParallelSettings) -> None:
    """Raises ConfigError for float8 without torchao, and for sharded experts with a torch older than 2.12."""
    if settings.fp8 and find_spec("torchao") is None:
        raise ConfigError(f"parallel.fp8 needs torchao: {pip_install('fp8')}, or set it to false")
    if settings.ep > 1 and not hasattr(_fsdp_common, "ShardPlacementResult"):
        raise ConfigError(f"parallel.ep needs torch 2.12, here is {torch.__version__}; upgrade it, or set ep to 1")


def build(config: Config, world: World) -> Decoder:
    """This rank's part of the model, with initial values drawn from ``run.seed``."""
    stages = stage_ranges(config.model, config.parallel, config.data.sequence)
    with torch.device("meta"):
        model = Decoder(config.model, stages[world.stage :: config.parallel.pp])
    model.context = model.routing.context = world.context
    model.routing.balance_loss = config.optimizer.balance_loss
    model.routing.z_loss = config.optimizer.router_z_loss
    model.routing.copies = config.parallel.tp
    if config.parallel.fp8:
        _to_float8(model)
    if world.tensor is not None:
        _split_matrices(model, world.tensor)
    _split_experts(model, world)
    for block in model.blocks.values():
        _wrap_forward(cast(Block, block), config.parallel)
    of_part = torch.compile(part_loss) if config.parallel.compile else part_loss
    model.loss = partial(linear_loss, of_part=of_part, halves=config.parallel.schedule == "zero-bubble")
    _shard(model, config, world)
    model.to_empty(device=world.device)
    model.tie()
    initialise(model, config.run.seed)
    return model


def _split_matrices(model: Decoder, mesh: DeviceMesh) -> None:
    """Tensor parallelism (Megatron-LM, arXiv 1909.08053), with sequence parallelism between them (2205.05198)."""
    ends: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
    }
    layer: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.gate": ColwiseParallel(),
        "attention.query_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        "attention.key_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        "attention.output": RowwiseParallel(output_layouts=Shard(1)),
        "attention_post_norm": SequenceParallel(use_local_output=True),
        "ffn_norm": SequenceParallel(),
        "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "ffn.gate": ColwiseParallel(),
        "ffn.up": ColwiseParallel(),
        "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
        "ffn.experts": _ReduceExperts(),
        "ffn.shared.gate": ColwiseParallel(),
        "ffn.shared.up": ColwiseParallel(),
        "ffn.shared.down": RowwiseParallel(output_layouts=Shard(1)),
        "ffn.shared_gate": SequenceParallel(use_local_output=True),
        "ffn_post_norm": SequenceParallel(use_local_output=True),
    }
    modules = dict(model.named_modules())
    parallelize_module(model, mesh, {name: style for name, style in ends.items() if name in modules})
    for block in model.blocks.values():
        modules = dict(block.named_modules())
        styles = layer | _mixer_styles(modules["attention"])
        parallelize_module(block, mesh, {name: style for name, style in styles.items() if name in modules})
    model.tie()
    if model.last:
        model.vocabulary = mesh.get_group()


def _mixer_styles(mixer: nn.Module) -> dict[str, ParallelStyle]:
    """Of what differs between the kinds of layers."""
    if isinstance(mixer, LatentAttention):
        styles = _latent_matrices()
    elif isinstance(mixer, Recurrent):
        styles = _state_matrices(mixer)
    else:
        styles = {"": _whole_input()}
    return {f"attention.{name}".rstrip("."): style for name, style in styles.items()}


def _whole_input() -> ParallelStyle:
    return PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))


def _latent_matrices() -> dict[str, ParallelStyle]:
    """Of latent attention: each rank computes the latents of its tokens, which are gathered, and expands its heads."""
    expand = {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("query", "query_up", "kv_up")}
    own = {name: SequenceParallel() for name in ("query_down", "query_norm", "kv_down", "kv_norm")}
    return expand | own | {"shared_key": _GatherKey()}


def _state_matrices(mixer: Recurrent) -> dict[str, ParallelStyle]:
    """Of layers with a state: each rank has some of the heads, with all tokens."""
    columns = {name: ColwiseParallel() for name in ("step", "write")}
    convolutions = {name: _OwnChannels() for name in ("query_conv", "key_conv", "value_conv")}
    by_head = SequenceParallel(sequence_dim=2, use_local_output=True)
    norm = _OwnChannels() if isinstance(mixer, Mamba) else by_head
    return columns | convolutions | {"norm": norm, "": _OwnChannels(_whole_input())}


class _OwnChannels(ParallelStyle):
    """Each rank has some rows of the module's own parameters; ``then`` is applied as well."""

    def __init__(self, then: ParallelStyle | None = None) -> None:
        self._then = then

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, value in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(value, device_mesh, [Shard(0)])))
        return self._then._apply(module, device_mesh) if self._then else module


class _GatherKey(ParallelStyle):
    """Gathers the tokens' keys that all heads share; each rank has the gradient of its own heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(_: nn.Module, inputs: tuple[DTensor]) -> torch.Tensor:
            return inputs[0].redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

        module.register_forward_pre_hook(whole)
        return module


class _ReduceExperts(ParallelStyle):
    """The ranks that share a layer's matrices route all tokens alike, and add up what their channels compute."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        router = module.get_submodule("router")
        router.weight = nn.Parameter(distribute_tensor(router.get_parameter("weight"), device_mesh, [Replicate()]))

        def whole(_: nn.Module, inputs: tuple[DTensor]) -> torch.Tensor:
            return inputs[0].to_local(grad_placements=[Partial()])

        def added(_: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
            return DTensor.from_local(output, device_mesh, [Partial()]).redistribute(placements=[Shard(1)]).to_local()

        module.register_forward_pre_hook(whole)
        module.register_forward_hook(added)
        return module


def _split_experts(model: Decoder, world: World) -> None:
    """The experts over the ranks of expert parallelism, and their channels over those of tensor parallelism."""
    if (mesh := world.expert_split) is None:
        return
    group = mesh["ep"].get_group() if world.parallel.ep > 1 else None
    model.routing.group = group
    for part in model.modules():
        if isinstance(part, Networks):
            for name, matrices in part.named_children():
                assert isinstance(matrices, GroupedLinear)
                channels = Shard(2 if name == "down" else 1)
                places = {"ep": Shard(0), "tp": channels}
                weight = matrices.get_parameter("weight")
                split = distribute_tensor(weight, mesh, [places[name] for name in mesh.mesh_dim_names or ()])
                matrices.weight = nn.Parameter(split)
                matrices.group = group


def _wrap_forward(block: Block, parallel: ParallelSettings) -> None:
    """Recompute and compile the layer. Only its ``forward`` is replaced, so that FSDP's hooks stay outside."""
    forward = block.forward
    if parallel.recompute != "none":
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        context_fn = contexts if parallel.recompute == "selective" else noop_context_fn
        forward = partial(
            checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=context_fn
        )  # fmt: skip
    if parallel.compile:
        forward = torch.compile(forward)
    block.forward = forward  # type: ignore[method-assign]


def _policy(_: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _to_float8(model: Decoder) -> None:
    """Multiply the layers' matrices in float8, each with its own scale (torchao's default recipe)."""
    from torchao.float8 import convert_to_float8_training

    def in_layer(module: nn.Module, name: str) -> bool:
        assert isinstance(module, nn.Linear)
        return name.startswith("blocks.") and module.in_features % 16 == module.out_features % 16 == 0

    convert_to_float8_training(model, module_filter_fn=in_layer)


def _shard(model: Decoder, config: Config, world: World) -> None:
    """FSDP: parameters, gradients and optimiser state are sharded, and gathered layer by layer.

    In a pipeline they stay gathered until the last micro-batch, because gathering for each would cost more than it
    saves, and so they do without other ranks to shard over.
    """
    policy = MixedPrecisionPolicy()
    if config.model.dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    again = config.parallel.pp == 1 and not world.whole
    placement = _placement(model, world.expert_sharding) if config.parallel.ep > 1 else None
    for block in model.blocks.values():
        fully_shard(
            block, mesh=world.sharding, mp_policy=policy, reshard_after_forward=again, shard_placement_fn=placement
        )
    fully_shard(model, mesh=world.sharding, mp_policy=policy, reshard_after_forward=False)


def _placement(model: Decoder, mesh: DeviceMesh) -> Callable[[nn.Parameter], _fsdp_common.ShardPlacementResult | None]:
    """Experts are sharded over ``mesh``, by the hooks of their layer: its recomputation must not run into others."""
    info = _fsdp_common.FSDPMeshInfo(mesh, 0)
    if mesh.ndim > 1:
        info = _fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    experts = {id(value) for part in model.modules() if isinstance(part, Networks) for value in part.parameters()}

    def place(parameter: nn.Parameter) -> _fsdp_common.ShardPlacementResult | None:
        return _fsdp_common.ShardPlacementResult(Shard(0), info) if id(parameter) in experts else None

    return place
