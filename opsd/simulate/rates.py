"""Faults from rates: exponential or Weibull times between them, repairs with heavy tails, lemon nodes, shared switches.

The repair times of the built-in rates are those of StepFun's trace (Kaplan-Meier over its days 0 to 200: half of them
within 35 h, nine tenths within 496 h). The split by effect is that of Llama 3's 419 interruptions (table 5 of its
report): 54 by software, 32 for maintenance, 16 by storage, power and hosts, the others by GPUs and network.
"""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from opsd.files import read_settings
from opsd.settings.sections import Section
from opsd.simulate.faults import CLUSTER, DAY_S, HOUR_S, PASSING, ClusterEffect, FaultsError, NodeEffect, SimulatedFault

PUBLISHED: Mapping[str, float] = {"stepfun": 4.16, "llama3": 3.79, "rsc1": 6.50, "rsc2": 2.34}
"""Faults in 1,000 node days: StepFun's trace, Llama 3 (Meta, 2024), Meta's research clusters (Kokolis et al., 2024)."""
_SHARES: Mapping[str, tuple[NodeEffect, float]] = {
    "gpu_network": ("hardware", 317 / 419), "software": ("process", 54 / 419), "maintenance": ("degraded", 32 / 419),
    "host": ("lost", 16 / 419),
}  # fmt: skip


class Kind(Section):
    """One kind of fault. Without a repair time the node is sound at once."""

    kind: str
    effect: NodeEffect
    per_1000_node_days: float = Field(gt=0, le=1e5)
    shape: float = Field(default=1.0, ge=0.2, le=10, description="Of the Weibull time between faults; 1: exponential.")
    repair_p50_h: float = Field(default=35.0, ge=0, le=1e5)
    repair_p90_h: float = Field(default=496.0, ge=0, le=1e6)
    speed: float = Field(default=1.0, gt=0, le=1, description="Of a degraded node; its job is no faster.")
    burst: int = Field(default=1, ge=1, le=1000, description="So many come one after the other, on the same node.")
    apart_s: float = Field(default=60.0, gt=0, le=1e6, description="Mean time between those of a burst.")
    noticed_p50_h: float = Field(default=0.0, ge=0, le=1e5, description="Until a corruption is noticed.")
    noticed_p90_h: float = Field(default=0.0, ge=0, le=1e6)


class Domain(Section):
    """Nodes that fail together, those of a switch, a rack, a feed: the first ``nodes`` of the cluster, and so on.

    ``share`` of them are hit, and all are back at once.
    """

    kind: str
    nodes: int = Field(ge=2, le=10_000)
    per_1000_domain_days: float = Field(gt=0, le=1e5)
    effect: Literal["lost", "hardware", "degraded"] = "lost"
    share: float = Field(default=1.0, gt=0, le=1, description="Of the nodes, that a fault of the domain hits.")
    repair_p50_h: float = Field(gt=0, le=1e5)
    repair_p90_h: float = Field(gt=0, le=1e6)
    speed: float = Field(default=1.0, gt=0, le=1, description="Of degraded nodes; their job is no faster.")


class Outage(Section):
    """Storage or Slurm's controller is away, for all nodes."""

    kind: str
    effect: ClusterEffect
    per_1000_days: float = Field(gt=0, le=1e6)
    repair_p50_h: float = Field(gt=0, le=1e5)
    repair_p90_h: float = Field(gt=0, le=1e6)


class RatesFile(Section):
    """``[[fault]]`` tables for nodes, ``[[domain]]`` for many, ``[[outage]]`` for what all need.

    ``lemon_share`` of the nodes have ``lemon_faults``.
    """

    fault: tuple[Kind, ...] = Field(min_length=1, strict=False)
    domain: tuple[Domain, ...] = Field(default=(), strict=False)
    outage: tuple[Outage, ...] = Field(default=(), strict=False)
    lemon_share: float = Field(
        default=0.05, gt=0, lt=1, description="StepFun's trace: 20 of 400 nodes, 24 % of faults."
    )
    lemon_faults: float = Field(default=0.24, gt=0, lt=1)

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        repaired: list[Kind | Domain | Outage] = [*self.fault, *self.domain, *self.outage]
        for fault in repaired:
            if fault.repair_p90_h < fault.repair_p50_h:
                more = f"half of the repairs take {fault.repair_p50_h:g} h"
                raise ValueError(
                    f"{fault.kind} has repair_p90_h {fault.repair_p90_h:g}, but {more}: give at least that"
                )
            if not isinstance(fault, Outage) and fault.speed < 1 and fault.effect != "degraded":
                raise ValueError(f"{fault.kind} has a speed and is {fault.effect}: only degraded nodes work on")
        for kind in self.fault:
            if kind.effect == "corruption" and not 0 < kind.noticed_p50_h <= kind.noticed_p90_h:
                raise ValueError(
                    f"{kind.kind} is a corruption: give noticed_p50_h and noticed_p90_h, the hours until half and "
                    "nine tenths of them are noticed"
                )
        return self


@dataclass(frozen=True, slots=True)
class Rates:
    """Independent processes for each node and kind."""

    name: str
    file: RatesFile

    @property
    def per_node_day(self) -> float:
        together = sum(domain.per_1000_domain_days / domain.nodes for domain in self.file.domain)
        return (sum(kind.per_1000_node_days * kind.burst for kind in self.file.fault) + together) / 1000

    def draw(self, nodes: int, seconds: float, seed: int) -> list[SimulatedFault]:
        """See ``FaultSource.draw``. All nodes are up at the start."""
        faults = [fault for outage in self.file.outage for fault in _outages(outage, seconds, seed)]
        shared = self._shared(nodes, seconds, seed)
        for node in range(nodes):
            random = Random(f"{seed}:{node}")
            share, of_faults = self.file.lemon_share, self.file.lemon_faults
            lemon = random.random() < share
            weight = of_faults / share if lemon else (1 - of_faults) / (1 - share)
            found = [fault for kind in self.file.fault for fault in _process(kind, node, weight, seconds, random)]
            faults += _apart(sorted([*found, *shared.get(node, ())], key=lambda fault: fault.start_s))
        return sorted(faults, key=lambda fault: (fault.start_s, fault.node))

    def _shared(self, nodes: int, seconds: float, seed: int) -> Mapping[int, list[SimulatedFault]]:
        """The faults of domains, by node."""
        hit: dict[int, list[SimulatedFault]] = defaultdict(list)
        for domain in self.file.domain:
            for first in range(0, nodes, domain.nodes):
                random = Random(f"{seed}:{domain.kind}:{first}")
                at = random.expovariate(domain.per_1000_domain_days / 1000 / DAY_S)
                while at < seconds:
                    end = at + _spread_s(domain.repair_p50_h, domain.repair_p90_h, random)
                    for node in range(first, first + domain.nodes):
                        if random.random() < domain.share:
                            hit[node].append(SimulatedFault(node, at, end, domain.kind, domain.effect, domain.speed))
                    at = end + random.expovariate(domain.per_1000_domain_days / 1000 / DAY_S)
        return hit


def _process(kind: Kind, node: int, weight: float, seconds: float, random: Random) -> list[SimulatedFault]:
    mean_s = DAY_S * 1000 / (kind.per_1000_node_days * weight)
    scale_s = mean_s / math.gamma(1 + 1 / kind.shape)
    faults, at = [], random.weibullvariate(scale_s, kind.shape)
    left = kind.burst
    while at < seconds:
        silent = kind.effect == "corruption"
        noticed_s = _spread_s(kind.noticed_p50_h, kind.noticed_p90_h, random) if silent else 0.0
        repair_s = 0.0 if kind.effect in PASSING else _spread_s(kind.repair_p50_h, kind.repair_p90_h, random)
        end = at + noticed_s + repair_s
        faults.append(SimulatedFault(node, at, end, kind.kind, kind.effect, kind.speed, noticed_s))
        left = left - 1 or kind.burst
        again_s = random.expovariate(1 / kind.apart_s) if left < kind.burst else None
        at = end + (again_s if again_s is not None else random.weibullvariate(scale_s, kind.shape))
    return faults


def _outages(outage: Outage, seconds: float, seed: int) -> list[SimulatedFault]:
    random = Random(f"{seed}:{outage.effect}:{outage.kind}")
    per_s = outage.per_1000_days / 1000 / DAY_S
    faults, at = [], random.expovariate(per_s)
    while at < seconds:
        end = at + _spread_s(outage.repair_p50_h, outage.repair_p90_h, random)
        faults.append(SimulatedFault(CLUSTER, at, end, outage.kind, outage.effect))
        at = end + random.expovariate(per_s)
    return faults


def _spread_s(p50_h: float, p90_h: float, random: Random) -> float:
    """Weibull, through the two quantiles: of StepFun's repairs that has a mean of 193 h, a log-normal one 298 h."""
    if p90_h == p50_h:
        return p50_h * HOUR_S
    shape = math.log(math.log(10) / math.log(2)) / math.log(p90_h / p50_h)
    return random.weibullvariate(p50_h / math.log(2) ** (1 / shape), shape) * HOUR_S


def _apart(faults: list[SimulatedFault]) -> list[SimulatedFault]:
    """Without those that find the node out of service already."""
    kept: list[SimulatedFault] = []
    for fault in faults:
        if not kept or fault.start_s >= kept[-1].end_s:
            kept.append(fault)
    return kept


def published(name: str) -> Rates:
    """The built-in rates ``name``, a key of ``PUBLISHED``."""
    kinds = tuple(
        Kind(kind=kind, effect=effect, per_1000_node_days=PUBLISHED[name] * share)
        for kind, (effect, share) in _SHARES.items()
    )
    return Rates(name, RatesFile(fault=kinds))


def load(path: Path) -> Rates:
    """The rates in the TOML file ``path``. Raises FaultsError."""
    try:
        return Rates(path.name, RatesFile.model_validate(tomllib.loads(read_settings(path).decode())))
    except OSError as error:
        known = ", ".join(PUBLISHED)
        raise FaultsError(f"{path} cannot be read: {error.strerror}; the built-in rates are {known}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FaultsError(f"{path} is no TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        raise FaultsError(": ".join(filter(None, (str(path), where, said)))) from error
