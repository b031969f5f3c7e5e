"""The exposition: byte for byte what prometheus-client makes of the same families, only faster."""

from __future__ import annotations

import gzip
import math
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from opsd.agent.loop import Snapshot
from opsd.agent.metrics import COST, OPENED
from opsd.agent.web.exposition import LABEL, Exemplar, Exposition, exemplars, negotiate
from opsd.collectors.base import Metric, Sample
from opsd.collectors.lib.kernel.xid import TOTAL
from opsd.runbooks.base import Cost, Evidence
from tests.fakes.incidents import WALL, incident

METRICS = (
    Metric("opsd_gauge_celsius", 'A "gauge"\nof \\ two lines.', "gauge", "celsius", ("gpu", "UUID")),
    Metric("opsd_time_seconds_total", "A counter.", "counter", "seconds", ("b", "a")),
    Metric("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "Energy (mJ).", "untyped", "", ("gpu", "UUID")),
    Metric("opsd_build_info", "Build.", "info", "", ("version", "python")),
    Metric("opsd_plain", "No labels."),
)
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
values = st.floats() | st.integers(-(10**12), 10**12).map(float)
labels = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
found = st.builds(Exemplar, labels, st.floats(0, 2e9))
samples = st.lists(
    st.sampled_from(METRICS).flatmap(
        lambda metric: st.builds(Sample, st.just(metric), values, st.tuples(*[labels for _ in metric.labels]))
    ),
    max_size=30,
)


@given(samples, samples, st.data())
def test_text_is_that_of_prometheus_client(first: list[Sample], second: list[Sample], data: st.DataObject) -> None:
    """Both formats, any values, labels and exemplars, on the first scrape and on one that uses what that has kept."""
    counters = [sample.labels for sample in (*first, *second) if sample.metric.kind == "counter"]
    marked = data.draw(st.dictionaries(st.sampled_from(counters), found)) if counters else {}
    exposition = Exposition(lambda: (first, second), lambda: {METRICS[1].name: marked})
    registry = CollectorRegistry()
    registry.register(exposition)
    for _ in range(2):
        assert exposition.render()[0] == generate_latest(registry)
        assert exposition.render(OPENMETRICS)[0] == generate_openmetrics(registry)


def test_openmetrics_can_be_parsed() -> None:
    """A strict parser accepts what is rendered, types and units included."""
    exposition = Exposition(lambda: [[Sample(m, 1.0, tuple("x" for _ in m.labels)) for m in METRICS]])
    families = {f.name: f for f in text_string_to_metric_families(exposition.render(OPENMETRICS)[0].decode())}
    assert {name: family.type for name, family in families.items()} == {
        "opsd_gauge_celsius": "gauge",
        "opsd_time_seconds": "counter",
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "unknown",
        "opsd_build": "info",
        "opsd_plain": "gauge",
    }
    assert families["opsd_time_seconds"].unit == "seconds"


def test_the_format_is_negotiated() -> None:
    """OpenMetrics and gzip only for a scraper that asks for them; what a Prometheus 3 sends is understood."""
    exposition = Exposition(lambda: [[Sample(METRICS[4], 1.0)]])
    plain, headers = exposition.render()
    assert headers == {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    prometheus = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3"
    body, headers = exposition.render(prometheus, "gzip")
    assert headers["Content-Encoding"] == "gzip"
    assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert gzip.decompress(body).endswith(b"opsd_plain 1.0\n# EOF\n")
    assert plain == b"# HELP opsd_plain No labels.\n# TYPE opsd_plain gauge\nopsd_plain 1.0\n"


kinds = st.sampled_from(["application/openmetrics-text", "text/plain", "text/html", " text/plain ", "*/*", ""])
versions = st.sampled_from(["", "0.0.1", "1.0.0", "1", "1.0.0.x", "2.0.0", "a", "1..0", "1.0", "²"])
escapings = st.sampled_from(["", "dots", "values", "underscores", "allow-utf-8", "x"])
part = st.builds(lambda k, v, e, q: f"{k};version={v}; escaping={e}{q}", kinds, versions, escapings, st.just(";q=0.5"))


@given(st.lists(part | kinds | st.text(max_size=9), max_size=4).map(",".join))
def test_the_format_is_that_which_prometheus_client_chooses(accept: str) -> None:
    """For any Accept header; where that raises, the plain format."""
    try:
        expected = choose_encoder(accept)[1]
    except TypeError:
        expected = choose_encoder("")[1]
    assert negotiate(accept) == expected


def test_a_series_delivered_twice_is_rendered_once() -> None:
    """A duplicate would make Prometheus refuse the whole scrape."""
    twice = [Sample(METRICS[4], 1.0), Sample(METRICS[4], 2.0)]
    assert Exposition(lambda: [twice, twice]).render()[0].count(b"\nopsd_plain ") == 1


def test_series_that_are_gone_are_not_kept() -> None:
    """Neither in the answer nor in memory."""
    snapshots = [[[Sample(METRICS[0], math.pi, ("0", "a"))]], [[Sample(METRICS[4], 1.0)]]]
    exposition = Exposition(lambda: snapshots[0])
    assert b"celsius" in exposition.render()[0]
    del snapshots[0]
    assert b"celsius" not in exposition.render()[0]


def test_scrapers_at_the_same_time_share_one_rendering() -> None:
    """The samples of a snapshot are gone through once, whatever number of scrapers asks in whatever form."""
    looks = []

    class Group(list[Sample]):
        def __iter__(self):
            looks.append(1)
            return super().__iter__()

    groups = [Group([Sample(METRICS[4], 1.0)])]
    exposition = Exposition(lambda: groups)
    bodies = [exposition.render(OPENMETRICS, "gzip")[0] for _ in range(50)]
    assert len(looks) == 1 and len(set(bodies)) == 1
    assert gzip.decompress(bodies[0]) == exposition.render(OPENMETRICS)[0]
    assert exposition.render()[0] != exposition.render(OPENMETRICS)[0] and len(looks) == 2


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_to_complain_about() -> None:
    """The agent's own metrics follow the naming rules of Prometheus."""
    from opsd.commands.metrics import catalogue

    group = [Sample(metric, 1.0, tuple("x" for _ in metric.labels)) for _, metric in catalogue()]
    body = Exposition(lambda: [group]).render()[0]
    checked = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True, check=False)
    said = (checked.stdout + checked.stderr).decode().splitlines()
    # Names and labels that begin with DCGM_FI_ are dcgm-exporter's.
    assert [line for line in said if not line.startswith("DCGM_FI_")] == []


def test_series_of_a_gpu_can_have_its_job_as_with_dcgm_exporter() -> None:
    """From one scrape to the next, and byte for byte as prometheus-client renders it; others have none."""
    busy = Metric("DCGM_FI_DEV_GPU_UTIL", "Busy.", labels=("gpu", "UUID"))
    job = Metric("opsd_gpu_job_info", "Job.", "info", labels=("gpu", "job_id", "run", "rank"))
    own = Metric("opsd_gpu_up", "Up.", labels=("gpu", "UUID"))
    gpus = [Sample(metric, 1.0, (str(n), f"GPU-{n}")) for metric in (busy, own) for n in range(2)]
    groups: list[list[Sample]] = [gpus]
    exposition = Exposition(lambda: [*groups], job_label=True)
    for numbers, said in (((), b""), (("4242", ""), b'hpc_job="4242"'), (("4243",), b'hpc_job="4243"')):
        groups[1:] = [[Sample(job, 1.0, (str(gpu), number, "r", "0")) for gpu, number in enumerate(numbers)]]
        body, _ = exposition.render()
        assert body.count(b"hpc_job=") == bool(said) and said in body
        assert b"hpc_job" not in body.partition(b"# HELP opsd_gpu_up")[2]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(exposition)
        assert body == generate_latest(registry)
    assert b"hpc_job" not in Exposition(lambda: [*groups]).render()[0]


def test_counters_lead_to_their_incidents() -> None:
    """The newest one of each series, by the GPU and code of an Xid; no counter at 0 has one, nor has the plain text."""
    said = (Evidence("Xid 119 on GPU 0: timeout", "kmsg", WALL), Evidence("Xid 163", "kmsg", WALL))
    shown = Snapshot(
        1, 0.0, WALL,
        incidents=(
            incident("new", kind="gpu_xid", opened_at=WALL + 9, evidence=said, data={"pci": "0000:01:00"}),
            incident("old", kind="gpu_xid", cost=Cost(gpu_seconds=5.0)),
        ),
        ended=(incident("ended", kind="straggler", resolved_at=WALL + 1),),
        samples=(
            [
                *(Sample(OPENED, value, (kind,)) for kind, value in (("gpu_xid", 2.0), ("straggler", 0.0))),
                Sample(COST, 5.0, ("gpu_xid",)),
                *(Sample(TOTAL, 1.0, ("0000:01:00", code)) for code in ("119", "79", "other")),
                Sample(TOTAL, 1.0, ("0000:02:00", "119")),
            ],
        ),
    )  # fmt: skip
    exposition = Exposition(lambda: shown.samples, lambda: exemplars(shown))
    families = text_string_to_metric_families(exposition.render(OPENMETRICS)[0].decode())
    series = {
        (s.name, *(s.labels[name] for name in ("kind", "pci_bus_id", "code") if name in s.labels)): s.exemplar
        for family in families
        for s in family.samples
    }
    assert {key: (e.labels[LABEL], float(e.timestamp)) for key, e in series.items() if e is not None} == {
        ("opsd_incidents_opened_total", "gpu_xid"): ("new", WALL + 9),
        ("opsd_incidents_gpu_seconds_total", "gpu_xid"): ("new", WALL + 9),
        ("opsd_xid_total", "0000:01:00", "119"): ("new", WALL + 9),
        ("opsd_xid_total", "0000:01:00", "other"): ("new", WALL + 9),
    }
    assert len(series) == 7 and LABEL.encode() not in exposition.render()[0]
