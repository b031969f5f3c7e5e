"""The agent's samples in the formats that Prometheus reads.

prometheus-client needs 13 ms for a scrape of 1,000 series, mostly for label strings that never change. Here these are
cached, which takes 1 ms. The result is byte for byte that of prometheus-client for ``families()``, and the format is
the one that it negotiates (tested). It is imported only for formats other than the two usual ones: it takes 4 MiB.
"""

from __future__ import annotations

import gzip
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from opsd.agent.loop import Snapshot
from opsd.agent.metrics import COST, OPENED
from opsd.agent.web.api import newest_first
from opsd.collectors.base import Metric, Sample
from opsd.collectors.lib.kernel.xid import COUNTED, TOTAL
from opsd.runbooks.base import Incident

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

_TYPES = {"gauge": "gauge", "counter": "counter", "untyped": "unknown", "info": "info"}
_PLAIN_TYPES = {**_TYPES, "untyped": "untyped", "info": "gauge"}
_SUFFIXES = {"counter": "_total", "info": "_info"}
_OPENMETRICS_TYPE = "application/openmetrics-text"
_OPENMETRICS = f"{_OPENMETRICS_TYPE}; version=1."
_PLAIN = "text/plain"
_USUAL = (_OPENMETRICS, _PLAIN)
_OLDEST = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPINGS = ("underscores", "allow-utf-8", "dots", "values")
_labels = attrgetter("labels")
_SPECIAL = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}

NONE: Mapping[tuple[str, ...], Exemplar] = MappingProxyType({})
JOB_INFO = "opsd_gpu_job_info"
"""Has the job of each GPU in its labels ``gpu`` and ``job_id``."""
JOB_LABEL = "hpc_job"
"""The label that dcgm-exporter gives to the series of a GPU on which a mapped job works."""


class _Series:
    """A series' line as it was last rendered, its first ``width`` characters being name and labels."""

    __slots__ = ("line", "scrape", "value", "width")

    def __init__(self, start: str) -> None:
        self.line, self.width, self.value, self.scrape = start, len(start), math.nan, 0


class _Family:
    """The series of one metric by their label values, and the lines of this scrape."""

    __slots__ = ("lines", "metric", "series")

    def __init__(self, metric: Metric) -> None:
        self.metric, self.series, self.lines = metric, dict[tuple[str, ...], _Series](), list[str]()

    def text(self, scrape: int, *, openmetrics: bool, exemplars: Mapping[tuple[str, ...], Exemplar] = NONE) -> str:
        """Header and lines. Series without a line in this ``scrape`` are forgotten, so that they do not accumulate."""
        if len(self.series) > len(self.lines):
            self.series = {labels: series for labels, series in self.series.items() if series.scrape == scrape}
        lines = self.lines
        if exemplars:
            marked = {
                series.line: f"{series.line[:-1]}{_exemplar(exemplars[labels])}\n"
                for labels, series in self.series.items()
                if series.value > 0 and labels in exemplars
            }
            lines = [marked.get(line, line) for line in lines]
        return _header(self.metric, openmetrics=openmetrics) + "".join(lines)


class Exposition:
    """Renders the result of ``latest``: groups of samples, any number of groups per metric.

    The rendered text of unchanged groups is reused, so that fifty scrapers cost as much as one, and so is the line of a
    series whose value is unchanged. Thread-safe.

    Of two samples of one series only the first is rendered, as a duplicate makes Prometheus refuse the whole scrape.

    ``exemplars`` are those of counters. Only OpenMetrics has them, and only for counters above 0.

    With ``job_label`` the series of dcgm-exporter have the label ``hpc_job`` while a job works on their GPU.
    """

    def __init__(
        self,
        latest: Callable[[], Sequence[Iterable[Sample]]],
        exemplars: Callable[[], Exemplars] = dict,
        *,
        job_label: bool = False,
    ) -> None:
        self._latest, self._exemplars, self._job_label = latest, exemplars, job_label
        self._jobs: Mapping[str, str] = {}
        self._families: dict[str, _Family] = {}
        self._scrape = 0
        self._guard = threading.Lock()
        self._groups: Sequence[Iterable[Sample]] | None = None
        self._bodies: dict[tuple[bool, bool], bytes] = {}

    def render(self, accept: str = "", accept_encoding: str = "") -> tuple[bytes, dict[str, str]]:
        """Body and headers for a scrape with these request headers: OpenMetrics and gzip if the scraper takes them."""
        content_type = negotiate(accept)
        headers = {"Content-Type": content_type}
        zipped = any(part.partition(";")[0].strip().lower() == "gzip" for part in accept_encoding.split(","))
        if zipped:
            headers["Content-Encoding"] = "gzip"
        if content_type.startswith(_USUAL):
            return self._body(openmetrics=content_type.startswith(_OPENMETRICS), zipped=zipped), headers
        body = self._other(accept)
        return _zip(body) if zipped else body, headers

    def _other(self, accept: str) -> bytes:
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        body: bytes = choose_encoder(accept)[0](registry)
        return body

    def _body(self, *, openmetrics: bool, zipped: bool) -> bytes:
        with self._guard:
            groups = self._latest()
            if groups is not self._groups:
                self._groups, self._bodies = groups, {}
            plain, wanted = (openmetrics, False), (openmetrics, zipped)
            if plain not in self._bodies:
                self._bodies[plain] = self._render(groups, openmetrics=openmetrics)
            if wanted not in self._bodies:
                self._bodies[wanted] = _zip(self._bodies[plain])
            return self._bodies[wanted]

    def collect(self) -> Iterator[Family]:
        """The samples as families of prometheus-client, in the order in which metrics first appear."""
        from prometheus_client.metrics_core import Metric as Family
        from prometheus_client.samples import Exemplar as Attached

        groups = self._latest()
        families: dict[str, tuple[Metric, dict[tuple[str, ...], float]]] = {}
        for metric, value, labels in chain.from_iterable(groups):
            families.setdefault(metric.name, (metric, {}))[1].setdefault(labels, value)
        jobs, exemplars = self._jobs_of(groups), self._exemplars()
        for metric, values in families.values():
            family = Family(_family_name(metric), metric.help, _TYPES[metric.kind], _unit(metric))
            for labels, value in values.items():
                found = exemplars.get(metric.name, NONE).get(labels) if value > 0 else None
                exemplar = found and Attached({LABEL: found.incident}, 1.0, found.at)
                family.add_sample(metric.name, dict(_labelled(metric, labels, jobs)), value, exemplar=exemplar)
            yield family

    def _render(self, groups: Iterable[Iterable[Sample]], *, openmetrics: bool) -> bytes:
        if (jobs := self._jobs_of(groups)) != self._jobs:
            self._jobs, self._families = jobs, {}
        self._scrape += 1
        self._families = families = self._filled(groups, self._scrape)
        told = self._exemplars() if openmetrics else {}
        texts = [
            family.text(self._scrape, openmetrics=openmetrics, exemplars=told.get(name, NONE))
            for name, family in families.items()
        ]
        if openmetrics:
            texts.append("# EOF\n")
        return "".join(texts).encode()

    def _filled(self, groups: Iterable[Iterable[Sample]], scrape: int) -> dict[str, _Family]:
        """The families with their lines, in the order in which metrics first appear."""
        families: dict[str, _Family] = {}
        metric: Metric | None = None
        for sample_metric, value, labels in chain.from_iterable(groups):
            if sample_metric is not metric:
                metric = sample_metric
                if (family := families.get(metric.name)) is None:
                    family = self._families.get(metric.name)
                    if family is None or family.metric != metric:
                        family = _Family(metric)
                    family.lines.clear()
                    families[metric.name] = family
                all_series, lines = family.series, family.lines
            if (series := all_series.get(labels)) is None:
                series = all_series[labels] = _Series(_start(metric, labels, self._jobs))
            elif series.scrape == scrape:
                continue
            series.scrape = scrape
            if value != series.value:
                series.value, series.line = value, f"{series.line[: series.width]}{_number(value)}\n"
            lines.append(series.line)
        return families

    def _jobs_of(self, groups: Iterable[Iterable[Sample]]) -> Mapping[str, str]:
        """The job on each GPU by the GPU's index, if series are to have it; the first by name of several."""
        if not self._job_label:
            return {}
        told = [sample for sample in chain.from_iterable(groups) if sample.metric.name == JOB_INFO]
        if not told:
            return {}
        gpu, job = (told[0].metric.labels.index(label) for label in ("gpu", "job_id"))
        return {s.labels[gpu]: s.labels[job] for s in sorted(told, key=_labels, reverse=True) if s.labels[job]}


def is_cached(accept: str) -> bool:
    """Whether a scrape with this ``Accept`` gets a text that is rendered once for all."""
    return negotiate(accept).startswith(_USUAL)


def negotiate(accept: str) -> str:
    """The content type that prometheus-client chooses; the plain one if a version makes no sense."""
    for part in accept.split(","):
        kind, *parameters = part.split(";")
        if kind.strip() not in (_PLAIN, _OPENMETRICS_TYPE):
            continue
        pairs = [word.strip().partition("=") for word in parameters if "=" in word]
        version = next((value for key, _, value in pairs if key == "version"), "")
        wanted = next((value for key, _, value in pairs if key == "escaping"), "")
        escaping = wanted if wanted in _ESCAPINGS else _ESCAPINGS[0]
        try:
            stable = bool(version) and _version(version) >= (1, 0, 0)
        except TypeError:
            return _OLDEST
        if kind.strip() == _OPENMETRICS_TYPE and not version:
            return f"{_OPENMETRICS}0.0; charset=utf-8"
        if stable:
            given = version if kind.strip() == _OPENMETRICS_TYPE else "1.0.0"
            return f"{kind.strip()}; version={given}; charset=utf-8; escaping={escaping}"
    return _OLDEST


def _version(text: str) -> tuple[int | str, ...]:
    return tuple(int(part) if _is_number(part) else part for part in text.split("."))


def _is_number(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def _zip(body: bytes) -> bytes:
    return gzip.compress(body, compresslevel=1)


def _number(value: float) -> str:
    """As Go writes it, which takes to exponents earlier than Python."""
    text = repr(float(value))
    if text in _SPECIAL:
        return _SPECIAL[text]
    dot = text.find(".")
    if value > 0 and dot > 6:
        mantissa = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
        return f"{mantissa}e+{dot - 1:02d}"
    return text


def _labelled(metric: Metric, labels: tuple[str, ...], jobs: Mapping[str, str]) -> list[tuple[str, str]]:
    pairs = [*zip(metric.labels, labels, strict=True)]
    if jobs and metric.name.startswith("DCGM_FI_") and (job := jobs.get(dict(pairs).get("gpu", ""))):
        pairs.append((JOB_LABEL, job))
    return pairs


def _start(metric: Metric, labels: tuple[str, ...], jobs: Mapping[str, str]) -> str:
    """The constant part of a series' line: name and labels, sorted by label name."""
    pairs = sorted(_labelled(metric, labels, jobs))
    text = ",".join(f'{name}="{_escape(value)}"' for name, value in pairs)
    return f"{metric.name}{{{text}}} " if text else f"{metric.name} "


def _exemplar(exemplar: Exemplar) -> str:
    return f' # {{{LABEL}="{_escape(exemplar.incident)}"}} 1.0 {exemplar.at}'


def _header(metric: Metric, *, openmetrics: bool) -> str:
    if not openmetrics:
        text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
        return f"# HELP {metric.name} {text}\n# TYPE {metric.name} {_PLAIN_TYPES[metric.kind]}\n"
    name, unit = _family_name(metric), _unit(metric)
    lines = f"# HELP {name} {_escape(metric.help)}\n# TYPE {name} {_TYPES[metric.kind]}\n"
    return f"{lines}# UNIT {name} {unit}\n" if unit else lines


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _family_name(metric: Metric) -> str:
    return metric.name.removesuffix(_SUFFIXES.get(metric.kind, ""))


def _unit(metric: Metric) -> str:
    """The unit to declare. OpenMetrics requires names to end with it, which those of dcgm-exporter do not."""
    return metric.unit if metric.unit and _family_name(metric).endswith("_" + metric.unit) else ""


LABEL: Final = "incident_id"
_XID: Final = re.compile(r"\bXid (\d+)")


class Exemplar(NamedTuple):
    """The incident with this id, opened at ``at`` (epoch seconds)."""

    incident: str
    at: float


Exemplars = Mapping[str, Mapping[tuple[str, ...], Exemplar]]
"""By the name of the metric and the label values of the series."""


def exemplars(snapshot: Snapshot) -> Exemplars:
    """The newest incident of each series."""
    found: dict[str, dict[tuple[str, ...], Exemplar]] = {}
    for incident in newest_first(snapshot):
        for metric, labels in _series(incident):
            found.setdefault(metric, {}).setdefault(labels, Exemplar(incident.id, round(incident.opened_at, 3)))
    return found


def _series(incident: Incident) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield OPENED.name, (incident.kind,)
    if incident.cost.gpu_seconds > 0:
        yield COST.name, (incident.kind,)
    if isinstance(pci := incident.data.get("pci"), str):
        for code in _XID.findall(" ".join((incident.summary, *(evidence.text for evidence in incident.evidence)))):
            yield TOTAL.name, (pci, code if int(code) in COUNTED else "other")
