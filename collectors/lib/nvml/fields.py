"""NVML field values: which ones are asked for, how they are asked for cheaply, and what the answers mean.

Sandbox from ``FieldReader``, which makes the driver call, everything here is pure.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from opsd.collectors.base import Metric, Sample
from opsd.collectors.lib.nvml import series


class Target(NamedTuple):
    """Where the number of a field goes: ``value * scale`` into one series."""

    metric: Metric
    scale: float = 1.0
    extra: tuple[str, ...] = ()


FieldKey = tuple[int, int]
"""Field id and scope (a link, or 0)."""

# Field ids of nvml.h.
LINK_COUNT: Final = 91
_ALL_LINKS = 0xFFFFFFFF
_LINKS_SENT, _LINKS_RECEIVED = (138, _ALL_LINKS), (139, _ALL_LINKS)
_LINK_STATE = 165
_LINK_ERRORS: Mapping[int, str] = {
    # Hopper: the GPU's totals have the types.
    161: "",
    162: "",
    163: "",
    # Blackwell, which has no totals.
    206: "malformed_packet",
    207: "buffer_overrun",
    208: "receive",
    209: "receive_remote",
    210: "receive_general",
    211: "local_integrity",
    212: "transmit_discard",
    214: "failed_recovery",
    215: "recovery",
    219: "effective",
}
"""Error counters of one link and their types, "" where another field has the sum of the type over all links."""

_FIELDS: Mapping[FieldKey, Target] = {
    (82, 0): Target(series.MEMORY_TEMP),
    (83, 0): Target(series.ENERGY),
    (94, 0): Target(series.PCIE_REPLAYS),
    (179, 0): Target(series.PCIE_ERRORS, 1, ("non_fatal",)),
    (180, 0): Target(series.PCIE_ERRORS, 1, ("fatal",)),
    (3, 0): Target(series.ECC_ERRORS, 1, ("corrected", "volatile")),
    (4, 0): Target(series.ECC_ERRORS, 1, ("uncorrected", "volatile")),
    (5, 0): Target(series.ECC_ERRORS, 1, ("corrected", "aggregate")),
    (6, 0): Target(series.ECC_ERRORS, 1, ("uncorrected", "aggregate")),
    (29, 0): Target(series.RETIRED_PAGES, 1, ("single_bit",)),
    (30, 0): Target(series.RETIRED_PAGES, 1, ("double_bit",)),
    (31, 0): Target(series.RETIRED_PENDING),
    (142, 0): Target(series.REMAPPED_CORRECTABLE),
    (143, 0): Target(series.REMAPPED_UNCORRECTABLE),
    (144, 0): Target(series.REMAP_PENDING),
    (145, 0): Target(series.REMAP_FAILURE),
    (230, 0): Target(series.RECOVERY_ACTION),
    (38, 0): Target(series.NVLINK_ERRORS, 1, ("crc_flit",)),
    (45, 0): Target(series.NVLINK_ERRORS, 1, ("crc_data",)),
    (52, 0): Target(series.NVLINK_ERRORS, 1, ("replay",)),
    (59, 0): Target(series.NVLINK_ERRORS, 1, ("recovery",)),
}

_THROTTLE_FIELDS: Mapping[int, str] = {
    74: "sw_power_cap",
    76: "sync_boost",
    251: "sw_thermal",
    252: "hw_thermal",
    253: "hw_power_brake",
    269: "sw_thermal",
    270: "hw_thermal",
    271: "hw_power_brake",
}
"""Cumulative nanoseconds: 251 to 253 in the headers of CUDA 12.9 and 13.0, 269 to 271 in later ones."""


def field_plan(links: int) -> dict[FieldKey, Target | None]:
    """Every field of a GPU with ``links`` NVLinks and its series; None if several fields make up one."""
    plan: dict[FieldKey, Target | None] = dict(_FIELDS)
    plan |= dict.fromkeys([(field, 0) for field in _THROTTLE_FIELDS])
    if links:
        plan |= {_LINKS_SENT: Target(series.NVLINK_SENT, 1024), _LINKS_RECEIVED: Target(series.NVLINK_RECEIVED, 1024)}
    return plan


def link_plan(links: int) -> dict[FieldKey, Target | None]:
    """Every field of each of ``links`` NVLinks, likewise."""
    plan: dict[FieldKey, Target | None] = {}
    for link in range(links):
        plan[_LINK_STATE, link] = Target(series.NVLINK_UP, 1, (str(link),))
        plan |= dict.fromkeys([(field, link) for field in _LINK_ERRORS])
    return plan


class FieldValue(NamedTuple):
    """One ``nvmlFieldValue_t``: ``bits`` are the raw eight bytes of the value, ``result`` an NVML return code."""

    id: int
    scope: int
    timestamp_us: int
    latency_us: int
    type: int
    result: int
    bits: int


FIELD_VALUE: Final = struct.Struct("=IIqqIIQ")
_DOUBLE, _UNSIGNED_INT, _UNSIGNED_LONG, _UNSIGNED_LONG_LONG, _SIGNED_LONG_LONG, _SIGNED_INT, _UNSIGNED_SHORT = range(7)


def field_request(keys: Sequence[FieldKey]) -> bytearray:
    """An ``nvmlFieldValue_t`` array that asks for ``keys``.

    It has one entry to spare: drivers have been seen to look one past an NVLink field that is the last.
    """
    request = bytearray(FIELD_VALUE.size * (len(keys) + 1))
    for index, (field, scope) in enumerate(keys):
        FIELD_VALUE.pack_into(request, index * FIELD_VALUE.size, field, scope, 0, 0, 0, 0, 0)
    return request


def number(kind: int, bits: int) -> float:
    """A field's value by its declared type (``nvmlValueType_t``)."""
    if kind in (_UNSIGNED_LONG, _UNSIGNED_LONG_LONG):
        return bits
    if kind == _UNSIGNED_INT:
        return bits & 0xFFFFFFFF
    if kind == _UNSIGNED_SHORT:
        return bits & 0xFFFF
    if kind == _SIGNED_INT:
        return (bits & 0xFFFFFFFF ^ 0x80000000) - 0x80000000
    if kind == _SIGNED_LONG_LONG:
        return (bits ^ 1 << 63) - (1 << 63)
    return float(struct.unpack("=d", struct.pack("=Q", bits))[0])


Route = tuple[Metric, float, tuple[str, ...]]
"""Metric, scale and label values of the series that a field goes to."""


def parse_fields(answer: bytes | bytearray, routes: Sequence[Route | None]) -> tuple[list[Sample], list[FieldValue]]:
    """The samples in an answered request for ``len(routes)`` fields, and the rest: fields without route, or refused."""
    samples, rest = [], []
    for route, entry in zip(routes, FIELD_VALUE.iter_unpack(answer), strict=False):
        if route is None or entry[5]:
            rest.append(FieldValue._make(entry))
        else:
            metric, scale, labels = route
            samples.append(Sample(metric, number(entry[4], entry[6]) * scale, labels))
    return samples, rest


class FieldReader:
    """Some fields of one GPU, in one call of the driver's nvmlDeviceGetFieldValues with a request that is made once.

    pynvml has this call too, but it builds the request each time, which would be most of the collector's work.
    """

    def __init__(self, call: Callable[..., int], handle: Any, routes: Mapping[FieldKey, Route | None]) -> None:
        self._call = call
        self._handle = handle
        self._want(routes)

    def _want(self, routes: Mapping[FieldKey, Route | None]) -> None:
        self._wanted = dict(routes)
        self._routes = [*routes.values()]
        self._request = field_request([*routes])
        self._array = (ctypes.c_char * len(self._request)).from_buffer(self._request)

    def read(self) -> tuple[int, list[Sample], list[FieldValue]]:
        """NVML's return code, and what ``parse_fields`` makes of the answer."""
        if not self._routes:
            return 0, [], []
        code = self._call(self._handle, len(self._routes), self._array)
        return (code, *parse_fields(self._request, self._routes)) if code == 0 else (code, [], [])

    def forget(self, keys: Sequence[FieldKey]) -> None:
        """Do not ask for these any more."""
        self._want({key: route for key, route in self._wanted.items() if key not in keys})


def throttle_counters(fields: Sequence[FieldValue]) -> dict[str, int]:
    """Nanoseconds per throttle reason, from whichever field numbering the driver has.

    Other fields have had the same numbers (power smoothing, at 251 to 271); those are 32 bits wide, counters are 64.
    """
    wide = (_UNSIGNED_LONG, _UNSIGNED_LONG_LONG)
    return {
        _THROTTLE_FIELDS[f.id]: f.bits for f in fields if f.id in _THROTTLE_FIELDS and not f.result and f.type in wide
    }


def link_errors(fields: Sequence[FieldValue]) -> tuple[dict[int, float], dict[str, float]]:
    """Errors of all kinds per link, and errors of all links per type, as far as the driver has these counters."""
    by_link: dict[int, float] = {}
    by_type: dict[str, float] = {}
    for field in fields:
        kind = _LINK_ERRORS.get(field.id)
        if kind is not None and not field.result:
            errors = number(field.type, field.bits)
            by_link[field.scope] = by_link.get(field.scope, 0) + errors
            if kind:
                by_type[kind] = by_type.get(kind, 0) + errors
    return by_link, by_type


def nvlink_kib(samples: Sequence[Sample]) -> float | None:
    """KiB sent and received over all links as dcgm-exporter adds them up, None if the driver does not tell."""
    totals = [s.value for s in samples if s.metric is series.NVLINK_SENT or s.metric is series.NVLINK_RECEIVED]
    return sum(totals) / 1024 if len(totals) == 2 else None
