"""Building blocks of every board: stats, graphs, heat maps, timelines, tables, rows, variables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard, heatmap, prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders.common import GraphThresholdsStyleConfig, ReduceDataOptions, VizLegendOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a panel and the legend of its series."""

    expr: str
    legend: str = ""


def _target(query: Query, ref: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).ref_id(ref).datasource(DATASOURCE)
    return target.legend_format(query.legend) if query.legend else target


Panel = timeseries.Panel | stat.Panel | heatmap.Panel | statetimeline.Panel | table.Panel

_SAME = "${datasource:queryparam}&var-cluster=${__data.fields.cluster}"
TO_NODE = f"/d/opsd-node?{_SAME}&var-node=${{__data.fields.instance}}"
TO_JOB = f"/d/opsd-job?{_SAME}&var-job=${{__data.fields.job_id}}"
TO_RUNBOOK = "https://github.com/opsd/opsd/blob/main/docs/runbooks/${__data.fields.kind}.md"
TO_AGENT = "http://${__data.fields.instance}"
"""Links of a table's cells: boards of a node and a job, the documentation of a kind, the pages of a node's agent."""


TOKENS_PER_S = "si: tokens/s"
SOFT_TOP = {"percentunit": 0.1, "cps": 1, "s": 0.1, "Bps": 1024, "binBps": 1024}
"""Where the axis of a graph ends at least, by unit: Grafana draws values that are all 0 from 0 to 100 of any unit."""
_NARROW = 12
"""A graph of fewer columns has its legend below, or there is no room for lines."""


def graph(
    title: str, description: str, unit: str, *queries: Query, width: int = 12, floor: float | None = 0,
    top: float | None = None, warn_at: float | None = None, bad_at: float | None = None, empty: str = "",
) -> timeseries.Panel:  # fmt: skip
    """Lines over time; ``width`` is out of 24. ``floor`` is the minimum of the axis; None lets Grafana choose.

    The axis reaches to ``top`` at least. ``warn_at`` and ``bad_at`` are limits that are drawn as lines. ``empty`` is
    what a graph without data says; one without it always has data.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(DATASOURCE)
        .height(8)
        .span(width)
        .line_width(1)
        .fill_opacity(0)
        .show_points(common.VisibilityMode.NEVER)
        .legend(_legend(width))
    )
    if floor is not None and (end := top or SOFT_TOP.get(unit)):
        panel = panel.axis_soft_max(end)
    if empty:
        panel = panel.no_value(empty)
    for number, query in enumerate(queries):
        panel = panel.with_target(_target(query, chr(ord("A") + number)))
    if bad_at is not None:
        lines = GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        panel = panel.thresholds(_steps(warn_at, bad_at)).thresholds_style(lines)
    return panel if floor is None else panel.axis_soft_min(floor)


def _legend(width: int) -> VizLegendOptions:
    legend = VizLegendOptions().show_legend(True).sort_by("Name").sort_desc(False)
    if width < _NARROW:
        return legend.display_mode(common.LegendDisplayMode.LIST).placement(common.LegendPlacement.BOTTOM).calcs([])
    table = legend.display_mode(common.LegendDisplayMode.TABLE).placement(common.LegendPlacement.RIGHT)
    return table.calcs(["lastNotNull", "max"])


LABEL_WIDTHS = {"cluster": 90, "job_id": 90, "severity": 90, "state": 100}
"""Widths of columns in pixels; a label that is not named takes what is left."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: the value of an expression for the labels of its row. ``words`` are shown for its values."""

    title: str
    expr: str
    unit: str = "none"
    words: Mapping[int, tuple[str, str]] | None = None
    """Value -> text and colour."""


def listing(
    title: str, description: str, *columns: Column, links: Mapping[str, Mapping[str, str]], width: int = 12,
    empty: str = "",
) -> table.Panel:  # fmt: skip
    """A table of what is now, a row for each set of labels. The expressions of all ``columns`` have the same labels.

    ``empty`` is what a table without rows says. ``links`` are those of the cells of a label, URL by title.
    """
    panel = (
        table.Panel().title(title).description(description).unit("none").datasource(DATASOURCE).height(9).span(width)
    )
    if empty:
        panel = panel.no_value(empty)
    names = {}
    for number, column in enumerate(columns):
        ref = chr(ord("A") + number)
        target = _target(Query(column.expr), ref).instant().format(PromQueryFormat.TABLE)
        panel = panel.with_target(target)
        names["Value" if len(columns) == 1 else f"Value #{ref}"] = column.title
        panel = panel.override_by_name(column.title, _cell(column))
    panel = panel.with_transformation(model.DataTransformerConfig("merge", options={}))
    shown = {"renameByName": names, "excludeByName": {"Time": True}}
    panel = panel.with_transformation(model.DataTransformerConfig("organize", options=shown))
    for label, pixels in LABEL_WIDTHS.items():
        panel = panel.override_by_name(label, [model.DynamicConfigValue("custom.width", pixels)])
    for label, targets in links.items():
        found = [{"title": name, "url": url, "targetBlank": url.startswith("http")} for name, url in targets.items()]
        panel = panel.override_by_name(label, [model.DynamicConfigValue("links", found)])
    return panel


def _cell(column: Column) -> list[model.DynamicConfigValue]:
    pixels = max(80, 24 + 9 * len(column.title))
    cell = [model.DynamicConfigValue("unit", column.unit), model.DynamicConfigValue("custom.width", pixels)]
    if column.words:
        said = {str(value): {"text": text, "color": color} for value, (text, color) in column.words.items()}
        cell.append(model.DynamicConfigValue("mappings", [{"type": "value", "options": said}]))
        cell.append(model.DynamicConfigValue("custom.cellOptions", {"type": "color-text"}))
    return cell


def number(
    title: str, description: str, unit: str, query: Query, *, width: int = 4, bad_above: float | None = None,
    warn_above: float | None = None, empty: str = "no data",
) -> stat.Panel:  # fmt: skip
    """One number: green below ``warn_above``, red from ``bad_above`` on; no colour without limits."""
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(DATASOURCE)
        .height(4)
        .span(width)
        .no_value(empty)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_target(query, "A"))
    )
    if bad_above is None:
        return panel.color_mode(common.BigValueColorMode.NONE)
    return panel.thresholds(_steps(warn_above, bad_above))


def _steps(warn_above: float | None, bad_above: float) -> dashboard.ThresholdsConfig:
    steps = [model.Threshold(color="green", value=None)]
    if warn_above is not None:
        steps.append(model.Threshold(color="orange", value=warn_above))
    steps.append(model.Threshold(color="red", value=bad_above))
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)


def heat_map(title: str, description: str, unit: str, query: Query, *, width: int = 12) -> heatmap.Panel:
    """The distribution of many series over time, which shows one outlier among thousands."""
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(DATASOURCE)
        .height(8)
        .span(width)
        .calculate(True)
        .with_target(_target(query, "A"))
    )


def timeline(
    title: str, description: str, *queries: Query, width: int = 24, height: int = 6, empty: str = ""
) -> statetimeline.Panel:
    """States over time; a series that is 1 while its state holds is drawn as a bar. ``empty`` is said without any."""
    panel = (
        statetimeline.Panel()
        .title(title)
        .description(description)
        .unit("bool_yes_no")
        .datasource(DATASOURCE)
        .height(height)
        .span(width)
        .show_value(common.VisibilityMode.NEVER)
        .thresholds(_steps(warn_above=None, bad_above=1))
    )
    for number, query in enumerate(queries):
        panel = panel.with_target(_target(query, chr(ord("A") + number)))
    return panel.no_value(empty) if empty else panel


@dataclass(frozen=True, slots=True)
class Row:
    """A row of panels; a ``collapsed`` one sends no queries until it is opened."""

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool


def row(title: str, *panels: Panel, collapsed: bool = False) -> Row:
    """The row with these panels."""
    return Row(title, panels, collapsed)


def _add(result: dashboard.Dashboard, row: Row) -> dashboard.Dashboard:
    head = dashboard.Row(row.title)
    if row.collapsed:
        for panel in row.panels:
            head = head.with_panel(panel)
        return result.with_row(head.collapsed(True))
    result = result.with_row(head)
    for panel in row.panels:
        result = result.with_panel(panel)
    return result


def label_variable(
    name: str, label: str, metric: str, *, of: str = "", within: str = "", all_of_them: bool = True
) -> dashboard.QueryVariable:
    """A variable over the values of the Prometheus label ``of`` (its own name if not given), of series ``within``."""
    variable = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(f"label_values({metric}{{{within}}}, {of or name})")
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.NATURAL_ASC)
        .multi(all_of_them)
        .include_all(all_of_them)
    )
    return variable.all_value(".*") if all_of_them else variable


def board(
    uid: str, title: str, description: str, variables: Iterable[dashboard.QueryVariable], *, within: str = "",
    rows: Iterable[Row],
) -> dashboard.Dashboard:  # fmt: skip
    """A board of ``rows``: datasource variable, ``variables``, annotations of incidents that match ``within``."""
    result = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["opsd"])
        .readonly()
        .timezone("browser")
        .refresh("10s")
        .time("now-1h", "now")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(label_variable("cluster", "Cluster", "opsd_build_info"))
        .link(
            dashboard.DashboardLink("opsd")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags(["opsd"])
            .as_dropdown(True)
            .include_vars(True)
        )
    )
    for variable in variables:
        result = result.with_variable(variable)
    written = dashboard.AnnotationTarget().type("tags").tags(["opsd"]).limit(200).match_any(False)
    result = result.annotation(
        dashboard.AnnotationQuery()
        .name("what agents wrote")
        .datasource(common.DataSourceRef(type_val="grafana", uid="-- Grafana --"))
        .enable(True)
        .icon_color("purple")
        .target(written)  # type: ignore[arg-type]  # the SDK knows queries here, Grafana its own tags as well
    )
    result = result.annotation(
        dashboard.AnnotationQuery()
        .name("incidents")
        .datasource(DATASOURCE)
        .enable(True)
        .icon_color("red")
        .expr(f"increase(opsd_incidents_opened_total{{{within}}}[$__rate_interval]) > 0")
        .title_format("{{kind}} on {{instance}}")
    )
    for one in rows:
        result = _add(result, one)
    return result


def to_json(built: dashboard.Dashboard) -> str:
    """The board's JSON; equal boards give equal text."""
    return json.dumps(built.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"
