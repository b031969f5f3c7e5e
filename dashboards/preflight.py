"""The preflight board: which nodes passed, and how their measurements change over weeks.

Its series come from ``opsd preflight --textfile`` through node_exporter's textfile collector, not from the agent.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from opsd.dashboards.kit import Query, board, graph, label_variable, number, row, timeline

NODES = 'node=~"$node"'
CHECKS = f'{NODES}, check=~"$check"'

FAILED = f'max by (node, check) (opsd_preflight_check_verdict{{{CHECKS}, verdict="fail"}}) > 0'

NOW = row(
    "Now",
    number(
        "Nodes that failed",
        "Nodes that failed their last preflight.",
        "none",
        Query(f"count(opsd_preflight_passed{{{NODES}}} == 0) or vector(0)"),
        bad_above=1,
        width=8,
    ),
    number(
        "Nodes that passed",
        "Nodes that passed their last preflight.",
        "none",
        Query(f"count(opsd_preflight_passed{{{NODES}}} == 1) or vector(0)"),
        width=8,
    ),
    number(
        "Oldest preflight",
        "Time since the oldest preflight of any node. No data: no node was ever checked.",
        "s",
        Query(f"time() - min(opsd_preflight_end_timestamp_seconds{{{NODES}}})"),
        warn_above=7 * 86_400,
        bad_above=30 * 86_400,
        width=8,
    ),
)

HISTORY = row(
    "History",
    timeline(
        "Checks that failed",
        "A bar from a preflight in which the check failed until the next one in which it passed.",
        Query(FAILED, "{{node}} {{check}}"),
        empty="none",
    ),
)

MEASURED = row(
    "Measurements",
    graph(
        "Against the fleet",
        "Each measurement divided by the median of all nodes; 1 is typical. The ten lowest.",
        "percentunit",
        Query(
            f"bottomk(10, avg by (node, check, measure) (opsd_preflight_value{{{CHECKS}}})\n"
            "  / on (check, measure) group_left ()\n"
            "quantile by (check, measure) (0.5, opsd_preflight_value))",
            "{{node}} {{check}} {{measure}}",
        ),
        top=1,
        empty="no preflight",
    ),
    graph(
        "Time taken",
        "How long each check took, on the slowest node.",
        "s",
        Query(f"max by (check) (opsd_preflight_check_seconds{{{CHECKS}}})", "{{check}}"),
        empty="no preflight",
    ),
)


def build() -> dashboard.Dashboard:
    """Rows: now, history, measurements."""
    variables = [
        label_variable("node", "Node", "opsd_preflight_passed"),
        label_variable("check", "Check", "opsd_preflight_check_seconds", within=NODES),
    ]
    description = "Preflights of all nodes, from opsd preflight --textfile and node_exporter."
    return board(
        "opsd-preflight",
        "opsd / preflight",
        description,
        variables,
        within='cluster=~"$cluster"',
        rows=(NOW, HISTORY, MEASURED),
    )
