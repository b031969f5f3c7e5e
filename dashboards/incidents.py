"""The incidents board: what fails how often, what opsd did about it, and whether opsd itself works."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from opsd.dashboards.kit import Query, board, graph, label_variable, number, row, timeline

ALL = 'cluster=~"$cluster", instance=~"$node"'
_STATES = (("open", "No action yet."), ("acting", "An action is running."), ("verifying", "Checking if it helped."))

NOW = row(
    "Now",
    *(
        number(
            state.capitalize(),
            f"Incidents in this state. {said}",
            "none",
            Query(f'sum(opsd_incidents{{{ALL}, state="{state}"}})'),
            warn_above=1,
            bad_above=10,
            width=5,
        )
        for state, said in _STATES
    ),
    number(
        "Escalated",
        "Incidents that wait for a person.",
        "none",
        Query(f'sum(opsd_incidents{{{ALL}, state="escalated"}})'),
        bad_above=1,
        width=5,
    ),
    number(
        "Days between two",
        "Mean time between incidents of the selected nodes, over a week.",
        "d",
        Query(f"7 / (sum(increase(opsd_incidents_opened_total{{{ALL}}}[7d])) > 0)"),
        width=4,
        empty="none",
    ),
)

WHEN = row(
    "When",
    timeline(
        "Incidents",
        "A bar while at least one incident of the kind is not resolved. No bar: healthy.",
        Query(f"max by (kind) (opsd_incidents{{{ALL}}}) > 0", "{{kind}}"),
        empty="none",
    ),
)

OFTEN = row(
    "How often",
    graph(
        "By kind",
        "Incidents opened per day.",
        "none",
        Query(f"sum by (kind) (increase(opsd_incidents_opened_total{{{ALL}}}[1d])) > 0", "{{kind}}"),
        top=1,
        empty="none in a day",
    ),
    graph(
        "By node",
        "The ten nodes with the most incidents in a week. Consider returning the worst to the vendor.",
        "none",
        Query(f"topk(10, sum by (instance) (increase(opsd_incidents_opened_total{{{ALL}}}[7d])))", "{{instance}}"),
        top=1,
    ),
)

LOST = f"increase(opsd_incidents_gpu_seconds_total{{{ALL}}}[7d])"
COST = row(
    "What they cost",
    graph(
        "GPU-time lost, by kind",
        "Of the last seven days, where a runbook can tell. Symptoms are left out.",
        "s",
        Query(f"sum by (kind) ({LOST}) > 0", "{{kind}}"),
        empty="none",
    ),
    graph(
        "GPU-time lost, by node",
        "The ten nodes that cost the most in seven days.",
        "s",
        Query(f"topk(10, sum by (instance) ({LOST}) > 0)", "{{instance}}"),
        empty="none",
    ),
)

ACTIONS = row(
    "Actions",
    graph(
        "Done",
        "Actions by verb and outcome, per hour.",
        "none",
        Query(f"sum by (verb, outcome) (increase(opsd_actions_total{{{ALL}}}[1h])) > 0", "{{verb}} {{outcome}}"),
        top=1,
        empty="none in an hour",
    ),
    graph(
        "Xids",
        "Xids that the drivers reported, by code, per hour.",
        "none",
        Query(f"sum by (code) (increase(opsd_xid_total{{{ALL}}}[1h])) > 0", "Xid {{code}}"),
        top=1,
        empty="none in an hour",
    ),
)

ITSELF = row(
    "opsd itself",
    graph(
        "Blind collectors",
        "Collectors that fail or hang, by name.",
        "none",
        Query(
            f'count by (collector, state) (opsd_collector_state{{{ALL}, state=~"error|hung"}} == 1)',
            "{{collector}} {{state}}",
        ),
        width=8,
        top=1,
        empty="none",
    ),
    graph(
        "Errors of runbooks",
        "Exceptions in runbooks, by kind, per hour.",
        "none",
        Query(f"sum by (kind) (increase(opsd_runbook_errors_total{{{ALL}}}[1h])) > 0", "{{kind}}"),
        width=8,
        top=1,
        empty="none",
    ),
    graph(
        "Journals that cannot be written",
        "Incidents on these nodes are kept only in memory.",
        "none",
        Query(f"count(opsd_journal_up{{{ALL}}} == 0) or vector(0)", "nodes"),
        width=8,
        top=1,
        bad_at=1,
    ),
)


def build() -> dashboard.Dashboard:
    """Rows of current incidents, times and counts, then of cost, actions and opsd itself."""
    variables = [label_variable("node", "Node", "opsd_build_info", of="instance", within='cluster=~"$cluster"')]
    return board(
        "opsd-incidents",
        "opsd / incidents",
        "Incidents and actions of all agents.",
        variables,
        within=ALL,
        rows=(NOW, WHEN, OFTEN, COST, ACTIONS, ITSELF),
    )
