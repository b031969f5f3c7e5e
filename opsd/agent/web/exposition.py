"""The agent's samples in the formats that Prometheus reads.

prometheus-client needs 13 ms for a scrape of 1,000 series, mostly for label strings that never change. Here these are
cached, which takes 1 ms. The result is byte for byte that of prometheus-client for ``families()``, and the format is
the one that it negotiates (tested). It is imported only for formats other than the two usual ones: it takes 4 MiB.
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from opsd.collectors.base import Metric, Sample

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

_TYPES = {"gauge": "gauge", "counter": "counter", "untyped": "unknown", "info": "info"}
_PLAIN_TYPES = {**_TYPES, "untyped": "untyped", "info": "gauge"}
_SUFFIXES = {"counter": "_total", "info": "_info"}
_OPENMETRICS_TYPE = "application/openmetrics-text"
_OPENMETRICS = f"{_OPENMETRICS_TYPE}; version=1."
_PLAIN = "text/plain"
_OLDEST = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPINGS = ("underscores", "allow-utf-8", "dots", "values")
_SPECIAL = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}

Values = dict[tuple[str, ...], float]

JOB_INFO = "opsd_gpu_job_info"
"""Has the job of each GPU in its labels ``gpu`` and ``job_id``."""
JOB_LABEL = "hpc_job"
"""The label that dcgm-exporter gives to the series of a GPU on which a mapped job works."""


class Exposition:
    """Renders the result of ``latest``: groups of samples, any number of groups per metric.

    The rendered text of unchanged groups is reused, so that fifty scrapers cost as much as one. Thread-safe.

    Of two samples of one series only the first is rendered, as a duplicate makes Prometheus refuse the whole scrape.

    With ``job_label`` the series of dcgm-exporter have the label ``hpc_job`` while a job works on their GPU.
    """

    def __init__(self, latest: Callable[[], Sequence[Iterable[Sample]]], *, job_label: bool = False) -> None:
        self._latest, self._job_label = latest, job_label
        self._jobs: Mapping[str, str] = {}
        self._starts: dict[str, dict[tuple[str, ...], str]] = {}
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
        if content_type.startswith((_OPENMETRICS, _PLAIN)):
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

        families = _grouped(self._latest())
        jobs = self._jobs_of(families)
        for metric, values in families:
            family = Family(_family_name(metric), metric.help, _TYPES[metric.kind], _unit(metric))
            for labels, value in values.items():
                family.add_sample(metric.name, dict(_labelled(metric, labels, jobs)), value)
            yield family

    def _render(self, groups: Iterable[Iterable[Sample]], *, openmetrics: bool) -> bytes:
        lines: list[str] = []
        starts: dict[str, dict[tuple[str, ...], str]] = {}
        families = _grouped(groups)
        if (jobs := self._jobs_of(families)) != self._jobs:
            self._jobs, self._starts = jobs, {}
        for metric, values in families:
            lines.append(_header(metric, openmetrics=openmetrics))
            known, used = self._starts.get(metric.name, {}), starts.setdefault(metric.name, {})
            for labels, value in values.items():
                start = known.get(labels) or _start(metric, labels, jobs)
                used[labels] = start
                lines.append(f"{start}{_number(value)}\n")
        # Only labels used in this scrape are kept, so that ended series do not accumulate.
        self._starts = starts
        if openmetrics:
            lines.append("# EOF\n")
        return "".join(lines).encode()

    def _jobs_of(self, families: Iterable[tuple[Metric, Values]]) -> Mapping[str, str]:
        """The job on each GPU by the GPU's index, if series are to have it; the first by name of several."""
        if not self._job_label:
            return {}
        told = next(((metric, values) for metric, values in families if metric.name == JOB_INFO), None)
        if told is None:
            return {}
        gpu, job = (told[0].labels.index(label) for label in ("gpu", "job_id"))
        return {labels[gpu]: labels[job] for labels in sorted(told[1], reverse=True) if labels[job]}


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


def _grouped(groups: Iterable[Iterable[Sample]]) -> Collection[tuple[Metric, Values]]:
    families: dict[str, tuple[Metric, Values]] = {}
    metric: Metric | None = None
    values: Values = {}
    for group in groups:
        for sample_metric, value, labels in group:
            if sample_metric is not metric:
                metric = sample_metric
                values = families.setdefault(metric.name, (metric, {}))[1]
            if labels not in values:
                values[labels] = value
    return families.values()


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
