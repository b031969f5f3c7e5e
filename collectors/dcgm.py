"""GPUs through DCGM, where it runs on the node: dcgm-exporter's series as they are, or those of the host engine itself.

The exporter refreshes its values at its own pace (every 30 s by default), so this asks rarely. No counter is read
twice: ``Yielding`` takes these series out of the NVML collector's readings while they come from here.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from pydantic import Field

from opsd.collectors.base import Collector, Metric, NoData, Plugin, Reading, Sample
from opsd.collectors.lib.dcgm_engine import EngineError, HostEngine
from opsd.collectors.lib.nvml import gpm
from opsd.collectors.lib.nvml import series as nvml_series
from opsd.settings.section import CollectorSettings, LocalUrl

URL: Final = "http://localhost:9400/metrics"
MAX_ANSWER: Final = 8 << 20
UP = Metric("opsd_dcgm_exporter_up", "1 if dcgm-exporter on this node answered the last question.")
ENGINE_UP = Metric("opsd_dcgm_engine_up", "1 if the DCGM host engine was read, which it is without dcgm-exporter.")
SERIES: Final = {
    metric.name: metric for metric in (*nvml_series.METRICS, *gpm.METRICS) if metric.name.startswith("DCGM_FI_")
}
"""What is taken over; anything else that the exporter has is Prometheus's own to scrape."""


class DcgmError(Exception):
    """dcgm-exporter is there and gave no usable answer; the message says why in one sentence."""


def parse_exposition(text: str) -> Iterator[Sample]:
    """The samples in the exporter's answer, each series once. Raises DcgmError.

    Left out are samples of MIG instances, which have the labels of their GPU, and DCGM's numbers for "not supported".
    """
    seen: set[tuple[str, tuple[str, ...]]] = set()
    try:
        for family in text_string_to_metric_families(text):
            for name, labels, value, *_ in family.samples:
                # The parser gives counters the ending that dcgm-exporter leaves out.
                metric = SERIES.get(name.removesuffix("_total"))
                if metric is None or labels.get("GPU_I_ID") or _blank(value):
                    continue
                key = tuple(labels.get(label, "") for label in metric.labels)
                if (metric.name, key) not in seen:
                    seen.add((metric.name, key))
                    yield Sample(metric, value, key)
    except (ValueError, KeyError, IndexError) as error:
        raise DcgmError(f"dcgm-exporter's answer is not in Prometheus's format: {error}") from error


def _blank(value: float) -> bool:
    """True for the numbers by which DCGM says that it has none: DCGM_INT64_BLANK, DCGM_FP64_BLANK and what follows."""
    return value >= 0x7FFFFFFFFFFFFFF0 or 0 <= value - float(1 << 47) < 16


def fetch(url: str, timeout_s: float) -> str:
    """The page at ``url``, in twice ``timeout_s``. Raises ConnectionRefusedError if nothing listens, or DcgmError."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "localhost", parts.port or 80, timeout=timeout_s)
    deadline = time.monotonic() + timeout_s
    try:
        connection.request("GET", parts.path or "/metrics")
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise DcgmError(f"{url} answered with status {response.status}")
        body = bytearray()
        while chunk := response.read1(1 << 16):
            body += chunk
            if len(body) > MAX_ANSWER or time.monotonic() > deadline:
                raise DcgmError(f"{url} has sent too much or too slowly ({len(body)} bytes)")
        return body.decode("utf-8", "replace")
    except ConnectionRefusedError:
        raise
    except (OSError, http.client.HTTPException) as error:
        raise DcgmError(f"{url} does not answer: {type(error).__name__} {error}") from error
    finally:
        connection.close()


class DcgmSettings(CollectorSettings):
    """GPUs through dcgm-exporter or else the DCGM host engine, where one runs; NVML is not asked for what it has."""

    url: LocalUrl = Field(
        default="http://localhost:9400/metrics", description="Where dcgm-exporter answers on this node."
    )
    interval_s: float = Field(default=5.0, ge=0, le=3600, description="Seconds between two questions to it.")


class DcgmCollector:
    """dcgm-exporter at ``url``, or else the host ``engine``, asked every ``period_s`` seconds.

    In between the last answer stands, and so does its last failure: a collector that fails must not seem to recover.
    """

    name = "dcgm"
    metrics = (UP, ENGINE_UP, *SERIES.values())

    def __init__(
        self,
        url: str = URL,
        *,
        period_s: float = 5.0,
        timeout_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        engine: HostEngine | None = None,
    ) -> None:
        self._url = url
        self._engine = engine or HostEngine(SERIES)
        self._period_s = period_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._asked: float | None = None
        self._last: Reading | NoData | DcgmError = NoData("dcgm-exporter has not been asked yet")
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

    def _ask(self) -> Reading | NoData:
        self.covered = frozenset()
        try:
            samples: tuple[Sample, ...] | None = tuple(parse_exposition(fetch(self._url, self._timeout_s)))
            source = UP
        except ConnectionRefusedError:
            samples, source = self._from_engine(), ENGINE_UP
        if samples is None:
            return NoData(f"no dcgm-exporter at {self._url}, and no DCGM host engine")
        self.covered = frozenset(sample.metric.name for sample in samples)
        up = tuple(Sample(metric, float(metric is source)) for metric in (UP, ENGINE_UP))
        return Reading((*up, *samples))

    def _from_engine(self) -> tuple[Sample, ...] | None:
        try:
            return self._engine.read()
        except EngineError as error:
            raise DcgmError(str(error)) from error


class Yielding:
    """``collector`` without the samples whose metric ``covered`` names right now."""

    def __init__(self, collector: Collector, covered: Callable[[], frozenset[str]]) -> None:
        self._collector = collector
        self._covered = covered
        self.name = collector.name
        self.metrics = collector.metrics

    def collect(self) -> Reading | NoData:
        """The collector's reading, less what comes from elsewhere."""
        reading = self._collector.collect()
        covered = self._covered()
        if isinstance(reading, NoData) or not covered:
            return reading
        return replace(reading, samples=tuple(s for s in reading.samples if s.metric.name not in covered))


COLLECTOR = Plugin(
    "dcgm",
    DcgmSettings,
    lambda settings, _context: DcgmCollector(settings.url, period_s=settings.interval_s),
    nvml_series.DCGM_LABELS,
)
