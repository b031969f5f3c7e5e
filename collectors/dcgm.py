"""GPUs through DCGM, where it runs on the node: dcgm-exporter's series as they are, or those of the host engine itself.

They add what the driver does not tell. Any user of the node can listen on the exporter's port. So the owner of the
socket is checked, the values are compared with the driver's, and the driver's are never replaced. The exporter
refreshes its values at
its own pace (every 30 s by default), so this asks rarely.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from pydantic import Field

from opsd.collectors.base import Context, GpuFact, Metric, NoData, Plugin, Reading, Sample
from opsd.collectors.lib.dcgm_engine import EngineError, HostEngine
from opsd.collectors.lib.listener import UntrustedError, connect, trusted_uids
from opsd.collectors.lib.nvml import gpm
from opsd.collectors.lib.nvml import series as nvml_series
from opsd.settings.sections import CollectorSettings, LocalUrl
from opsd.words import reason

URL: Final = "http://localhost:9400/metrics"
MAX_ANSWER: Final = 8 << 20
UP = Metric("opsd_dcgm_exporter_up", "1 if dcgm-exporter on this node answered the last question.")
ENGINE_UP = Metric("opsd_dcgm_engine_up", "1 if the DCGM host engine was read, which it is without dcgm-exporter.")
UNTRUSTED = Metric(
    "opsd_dcgm_untrusted", "1 if a user who is not believed listens where dcgm-exporter or the host engine should."
)
DISAGREEMENTS = Metric(
    "opsd_dcgm_disagreements", "GPUs, and values that rarely change, of which DCGM and the driver tell differently."
)
SERIES: Final = {
    metric.name: metric for metric in (*nvml_series.METRICS, *gpm.METRICS) if metric.name.startswith("DCGM_FI_")
}
"""What is taken over; anything else that the exporter has is Prometheus's own to scrape."""
STEADY: Final = frozenset(
    metric.name
    for metric in (nvml_series.REMAP_FAILURE, nvml_series.REMAPPED_CORRECTABLE, nvml_series.REMAPPED_UNCORRECTABLE)
)
"""Values that change so rarely that two sources must agree on them."""


class DcgmError(Exception):
    """dcgm-exporter is there and gave no usable answer; the message says why in one sentence."""


def parse_exposition(text: str) -> Iterator[Sample]:
    """The samples in the exporter's answer, each series once. Raises DcgmError.

    Left out are samples of MIG instances, which have the labels of their GPU, and DCGM's numbers for "not supported".
    """
    from prometheus_client.parser import text_string_to_metric_families  # megabytes that few nodes need

    seen: set[tuple[str, tuple[str, ...]]] = set()
    try:
        for family in text_string_to_metric_families(text):
            for name, labels, value, *_ in family.samples:
                # The parser gives counters the ending that dcgm-exporter leaves out.
                metric = SERIES.get(name.removesuffix("_total"))
                if metric is None or labels.get("GPU_I_ID") or _blank(value):
                    continue
                host = labels.get("hostname") or labels.get("Hostname", "")
                labels |= {"Hostname": host, "hostname": host}
                key = tuple(labels.get(label, "") for label in metric.labels)
                if (metric.name, key) not in seen:
                    seen.add((metric.name, key))
                    yield Sample(metric, value, key)
    except (ValueError, KeyError, IndexError) as error:
        raise DcgmError(f"dcgm-exporter's answer is not in Prometheus's format: {error}") from error


def _blank(value: float) -> bool:
    """True for the numbers by which DCGM says that it has none: DCGM_INT64_BLANK, DCGM_FP64_BLANK and what follows."""
    return value >= 0x7FFFFFFFFFFFFFF0 or 0 <= value - float(1 << 47) < 16


def fetch(url: str, timeout_s: float, uids: frozenset[int]) -> str:
    """The page at ``url``, in twice ``timeout_s``, from a listener of ``uids``.

    Raises ConnectionRefusedError if nothing listens, UntrustedError if it is another user's, or DcgmError.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "localhost", parts.port or 80
    try:
        raw = connect(host, port, uids, timeout_s)
    except ConnectionRefusedError:
        raise
    except OSError as error:
        raise DcgmError(f"{url} does not answer: {reason(error)}") from error
    import http.client  # megabytes that only a node with an exporter needs

    http_connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        http_connection.sock = raw
        deadline = time.monotonic() + timeout_s
        http_connection.request("GET", parts.path or "/metrics")
        response = http_connection.getresponse()
        if response.status != http.client.OK:
            raise DcgmError(f"{url} answered with status {response.status}")
        body = bytearray()
        while chunk := response.read1(1 << 16):
            body += chunk
            if len(body) > MAX_ANSWER or time.monotonic() > deadline:
                raise DcgmError(f"{url} has sent too much or too slowly ({len(body)} bytes)")
        return body.decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise DcgmError(f"{url} does not answer: {reason(error)}") from error
    finally:
        http_connection.close()


class DcgmSettings(CollectorSettings):
    """GPUs through dcgm-exporter or the DCGM host engine, where one runs: what the driver does not tell."""

    url: LocalUrl = Field(
        default="http://localhost:9400/metrics", description="Where dcgm-exporter answers on this node."
    )
    interval_s: float = Field(default=5.0, ge=0, le=3600, description="Seconds between two questions to it.")
    users: tuple[str, ...] = Field(
        default=("root",),
        strict=False,
        description="Users, by name or number, whose exporter or host engine is believed; besides root and opsd's own.",
    )


class DcgmCollector:
    """dcgm-exporter at ``url``, or else the host ``engine``, asked every ``period_s`` seconds.

    In between the last answer stands, and so does its last failure: a collector that fails must not seem to recover.
    An exporter is believed if its process belongs to one of ``uids``.
    """

    name = "dcgm"
    metrics = (UP, ENGINE_UP, UNTRUSTED, DISAGREEMENTS, *SERIES.values())
    yields_to = "nvml"

    def __init__(
        self,
        url: str = URL,
        *,
        period_s: float = 5.0,
        timeout_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        engine: HostEngine | None = None,
        uids: frozenset[int] = frozenset({0}),
        node: str = "",
    ) -> None:
        self._url = url
        self._engine = engine or HostEngine(SERIES, uids=uids)
        self._uids = uids
        self._period_s = period_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._asked: float | None = None
        self._last: Reading | NoData | DcgmError = NoData("dcgm-exporter has not been asked yet")
        self._untrusted = ""
        self._comparison = Comparison(STEADY, node or os.uname().nodename)
        self.covered: frozenset[str] = frozenset()

    def collect(self) -> Reading | NoData:
        """DCGM's series. Raises DcgmError if it is there and cannot be read.

        ``covered`` is then what these series are called; empty as soon as it does not answer.
        """
        now = self._clock()
        if self._asked is None or now - self._asked >= self._period_s:
            self._asked = now
            try:
                self._last = self._ask()
            except DcgmError as error:
                self._last = error
        if isinstance(self._last, DcgmError):
            raise self._last.with_traceback(None)
        return self._last

    def beside(self, own: Reading, driver: Reading) -> tuple[Reading, str]:
        """What ``own`` adds to what the driver tells, under the driver's labels; and what is wrong with it.

        Called in the agent's loop, with the newest readings of both.
        """
        told = tuple(sample for sample in own.samples if sample.metric is not DISAGREEMENTS)
        samples, differing = self._comparison.merge(told, driver, self._clock())
        wrong = [self._untrusted] if self._untrusted else []
        if differing:
            wrong.append(f"DCGM and the driver disagree on {', '.join(differing[:3])}")
        return replace(own, samples=(*samples, Sample(DISAGREEMENTS, len(differing)))), "; ".join(wrong)

    def _ask(self) -> Reading | NoData:
        self.covered, self._untrusted = frozenset(), ""
        samples: tuple[Sample, ...] | None = None
        source = UP
        try:
            samples = tuple(parse_exposition(fetch(self._url, self._timeout_s, self._uids)))
        except ConnectionRefusedError:
            pass
        except UntrustedError as error:
            self._untrusted = str(error)
        if samples is None:
            samples, source = self._from_engine(), ENGINE_UP
        if samples is None and not self._untrusted:
            return NoData(f"no dcgm-exporter at {self._url}, and no DCGM host engine")
        self.covered = frozenset(sample.metric.name for sample in samples or ())
        up = tuple(Sample(metric, float(metric is source and samples is not None)) for metric in (UP, ENGINE_UP))
        return Reading((*up, Sample(UNTRUSTED, float(bool(self._untrusted))), *(samples or ())))

    def _from_engine(self) -> tuple[Sample, ...] | None:
        try:
            return self._engine.read()
        except UntrustedError as error:
            self._untrusted = str(error)
            return None
        except EngineError as error:
            raise DcgmError(str(error)) from error


def _make(settings: DcgmSettings, context: Context) -> DcgmCollector:
    uids = trusted_uids(settings.users)
    return DcgmCollector(settings.url, period_s=settings.interval_s, uids=uids, node=context.node)


COLLECTOR = Plugin("dcgm", DcgmSettings, _make, nvml_series.DCGM_LABELS)


DIFFER_S: Final = 120.0
"""Seconds after which a difference of values counts: DCGM refreshes its values every 30 s by default."""
_IDENTITY: Final = ("gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname", "hostname")

_Key = tuple[str, str, tuple[str, ...]]


class Comparison:
    """Merges the samples of a second source with the driver's on ``node``; in ``steady`` metrics the two must agree."""

    def __init__(self, steady: Collection[str], node: str) -> None:
        self._steady = steady
        self._node = node
        self._since: dict[_Key, float] = {}

    def merge(self, samples: Sequence[Sample], driver: Reading, now: float) -> tuple[list[Sample], tuple[str, ...]]:
        """The ``samples`` that the driver has no value of, under its labels; and on what the two disagree.

        All samples are kept where the driver tells nothing. Those of a GPU that it does not know are left out. Values
        must differ for ``DIFFER_S``; ``now`` is in monotonic seconds.
        """
        gpus = {fact.uuid: fact for fact in driver.facts if isinstance(fact, GpuFact) and fact.uuid}
        if not gpus:
            self._since.clear()
            return list(samples), ()
        names = {sample.metric.name for sample in samples}
        values = {key: one.value for one in driver.samples if one.metric.name in names and (key := _key(one))}
        kept, strange, differing = [], set(), set()
        for sample in samples:
            key = _key(sample)
            gpu = gpus.get(key[1]) if key else None
            if key and (what := _strange(sample, key[1], gpu)):
                strange.add(what)
            if key is None:
                kept.append(sample)
            elif key not in values:
                kept += [_renamed(sample, gpu, self._node)] if gpu else []
            elif values[key] != sample.value and key[0] in self._steady:
                differing.add(key)
        self._since = {key: self._since.get(key, now) for key in differing}
        lasting = {f"{name} of {uuid}" for (name, uuid, _), at in self._since.items() if now - at >= DIFFER_S}
        return kept, tuple(sorted(strange | lasting))


def _strange(sample: Sample, uuid: str, gpu: GpuFact | None) -> str:
    """What the driver knows otherwise about the GPU of a sample, "" if nothing."""
    if gpu is None:
        return f"{uuid or 'a GPU without UUID'}, which the driver does not know"
    return f"the index of {uuid}" if _label(sample, "gpu") != str(gpu.index) else ""


def _key(sample: Sample) -> _Key | None:
    """The identity of the sample: metric, UUID and the labels beyond the GPU's identity; None without a GPU."""
    uuid, rest = _places(sample.metric.labels)
    if uuid is None:
        return None
    labels = sample.labels
    return sample.metric.name, labels[uuid], tuple(labels[place] for place in rest) if rest else ()


@lru_cache(maxsize=256)
def _places(names: tuple[str, ...]) -> tuple[int | None, tuple[int, ...]]:
    """Where among the labels the UUID stands, and those beyond the GPU's identity."""
    rest = tuple(place for place, name in enumerate(names) if name not in _IDENTITY)
    return names.index("UUID") if "UUID" in names else None, rest


def _label(sample: Sample, name: str) -> str:
    return sample.labels[sample.metric.labels.index(name)]


def _renamed(sample: Sample, gpu: GpuFact, node: str) -> Sample:
    """The sample under the labels that the driver's series of this GPU have."""
    identity = (str(gpu.index), gpu.uuid, gpu.pci_bus_id, f"nvidia{gpu.index}", gpu.model, node, node)
    known = dict(zip(_IDENTITY, identity, strict=True))
    named = zip(sample.metric.labels, sample.labels, strict=True)
    return sample._replace(labels=tuple(known.get(name, value) for name, value in named))
