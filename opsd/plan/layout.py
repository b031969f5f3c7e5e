"""How a run is spread over GPUs, all the ways that could be tried, and why one cannot be. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from opsd.trainer.config import Config

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: Final[tuple[Recompute, ...]] = ("none", "selective", "full")
_DEGREES: Final = (1, 2, 4, 8, 16, 32, 64)
_SHARDS: Final = (8, 32, 128)
_LEAST_TOKENS: Final = 2048
"""Of a sequence that context parallelism leaves on a GPU: with fewer, its products are too small."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The settings of ``[parallel]`` that a plan chooses, and ``data.micro_batch``."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    replicas: int = 1
    micro_batch: int = 1
    recompute: Recompute = "none"

    @classmethod
    def of(cls, config: Config) -> Layout:
        """The one that ``config`` has."""
        own = config.parallel
        return cls(own.tp, own.pp, own.cp, own.ep, own.replicas, config.data.micro_batch, own.recompute)

    @property
    def each(self) -> int:
        """GPUs that compute a micro-batch together."""
        return self.tp * self.pp * self.cp

    def groups(self, gpus: int) -> int:
        """How many parts the global batch is split into."""
        return gpus // self.each

    def shards(self, gpus: int) -> int:
        """Over how many GPUs FSDP spreads a parameter."""
        return gpus // (self.pp * self.replicas * self.tp)

    def micro_batches(self, gpus: int, batch: int) -> int:
        """Of a step, on each GPU."""
        return max(1, batch // (self.groups(gpus) * self.micro_batch))

    def settings(self) -> dict[str, Any]:
        """As ``[parallel]`` and ``data`` have them."""
        return {**{f"parallel.{name}": value for name, value in self.spread().items()},
                "data.micro_batch": self.micro_batch}  # fmt: skip

    def spread(self) -> dict[str, Any]:
        """All but the micro-batch."""
        return {name: value for name, value in asdict(self).items() if name != "micro_batch"}

    def name(self, gpus: int) -> str:
        """``DP 192 x TP 2, micro-batch 3, recompute none``."""
        parts = [f"DP {self.groups(gpus)}"]
        parts += [f"{kind.upper()} {size}" for kind in ("tp", "pp", "cp", "ep") if (size := getattr(self, kind)) > 1]
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        return f"{' x '.join(parts)}{replicas}, micro-batch {self.micro_batch}, recompute {self.recompute}"


def spreads(config: Config, gpus: int, node: int) -> Iterator[Layout]:
    """Every degree worth a look: tensor parallelism within a node, the others where model and GPUs divide."""
    model, sparse = config.model, config.model.expert_layers > 0
    for tp in (size for size in _DEGREES if size <= node):
        for pp in (size for size in range(1, 65) if not model.layers % size and (size == 1 or size * tp <= gpus)):
            for cp in (size for size in _DEGREES if size == 1 or config.data.sequence >= size * _LEAST_TOKENS):
                if gpus % (tp * pp * cp):
                    continue
                dp = gpus // (tp * pp)
                for ep in (size for size in _DEGREES if size == 1 or (sparse and not model.experts % size)):
                    whole = dp // ep if ep > 1 else dp
                    if dp % ep:
                        continue
                    yield Layout(tp, pp, cp, ep)
                    for shards in _SHARDS if ep == 1 else ():
                        if shards < whole and not dp % shards and not (gpus // (tp * pp * cp)) % (dp // shards):
                            yield Layout(tp, pp, cp, ep, dp // shards)


def problem(config: Config, layout: Layout, gpus: int) -> str | None:
    """Why the trainer cannot run ``config`` in ``layout`` on ``gpus`` GPUs, in words; None if it can."""
    if gpus % layout.each:
        return f"{gpus} GPUs are not a multiple of {layout.each}"
    parallel = config.parallel.model_copy(update=layout.spread())
    if found := parallel.problem(config.model, config.data.sequence):
        return found
    groups = layout.groups(gpus)
    if config.data.batch % (groups * layout.micro_batch):
        return f"data.batch {config.data.batch} is not a multiple of {groups} groups x micro-batch {layout.micro_batch}"
    if (count := layout.micro_batches(gpus, config.data.batch)) < layout.pp:
        return f"{count} micro-batches a step are fewer than the {layout.pp} stages"
    return None


def micro_batches_of(config: Config, layout: Layout, gpus: int) -> Iterator[int]:
    """The micro-batches that divide a group's share of the batch, ascending; one that does not if none does."""
    share, rest = divmod(config.data.batch, layout.groups(gpus))
    if rest or not share:
        yield 1
        return
    yield from (size for size in range(1, share + 1) if not share % size and share // size >= layout.pp)
    if share < layout.pp:
        yield 1
