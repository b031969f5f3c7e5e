"""The training board: learning curves and speed of runs, from the rank pages of any trainer."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from opsd.dashboards.kit import TOKENS_PER_S, Query, board, graph, heat_map, label_variable, row

ALL = 'cluster=~"$cluster"'
RUN = f'{ALL}, run=~"$run"'
DRAWN = f"opsd_data_source_tokens{{{RUN}}}"


def _share(tokens: str) -> str:
    """Share of each source in the ``tokens`` of its run."""
    return (
        f"max by (cluster, run, source) ({tokens})\n  / on (cluster, run) group_left ()\n"
        f"sum by (cluster, run) (max by (cluster, run, source) ({tokens}))"
    )


NO_SOURCES = "no run tells its sources"
NO_EVALUATION = "nothing evaluated"
LEARNING = row(
    "Learning",
    graph(
        "Loss",
        "Mean over the ranks of each run.",
        "none",
        Query(f"avg by (run) (opsd_rank_loss{{{RUN}}})", "{{run}}"),
        floor=None,
    ),
    graph(
        "Loss, spread over ranks",
        "Highest minus lowest rank. Never 0, as data-parallel ranks see different data. "
        "A sudden rise: one rank has left the others.",
        "none",
        Query(f"max by (run) (opsd_rank_loss{{{RUN}}}) - min by (run) (opsd_rank_loss{{{RUN}}})", "{{run}}"),
    ),
    graph(
        "Gradient norm",
        "Largest over the ranks. All ranks report the same value after clipping.",
        "none",
        Query(f"max by (run) (opsd_rank_grad_norm{{{RUN}}})", "{{run}}"),
        width=8,
    ),
    graph(
        "Learning rate",
        "Of the last completed step. If the loss rises slowly while it rises, suspect the schedule.",
        "none",
        Query(f"max by (run) (opsd_rank_learning_rate{{{RUN}}})", "{{run}}"),
        width=8,
    ),
    graph(
        "Step",
        "Highest step completed. It falls when a run returns to a checkpoint.",
        "none",
        Query(f"run:opsd_rank_step:max{{{RUN}}}", "{{run}}"),
        width=8,
    ),
)

SPEED = row(
    "Speed",
    graph(
        "Tokens/s",
        "All ranks together, and the median of the last six hours.",
        TOKENS_PER_S,
        Query(f"run:opsd_rank_tokens:rate5m{{{RUN}}}", "{{run}}"),
        Query(f"run:opsd_rank_tokens:usual6h{{{RUN}}}", "{{run}} usually"),
    ),
    graph(
        "MFU",
        "Model FLOPs utilisation, mean over the ranks of each run; its denominator is opsd_rank_peak_flops_per_second.",
        "percentunit",
        Query(f"avg by (run) (opsd_rank_mfu_ratio{{{RUN}}})", "{{run}}"),
        empty="no rank tells its model's FLOPs",
    ),
    heat_map(
        "Step times",
        "Ranks by the duration of their last step.",
        "s",
        Query(f"opsd_rank_step_seconds{{{RUN}}}"),
        width=8,
    ),
    graph(
        "Where the time goes",
        "Share of each phase in completed steps.",
        "percentunit",
        Query(f"run_phase:opsd_rank_phase_seconds:ratio_rate5m{{{RUN}}}", "{{run}} {{phase}}"),
        width=8,
    ),
    graph(
        "Goodput",
        "Over five minutes and over an hour.",
        "percentunit",
        Query(f"run:opsd_goodput:ratio_rate5m{{{RUN}}}", "{{run}}, 5 min"),
        Query(f"run:opsd_goodput:ratio_rate1h{{{RUN}}}", "{{run}}, 1 h"),
        width=8,
        top=1,
        empty="no run of five minutes",
    ),
)

DATA = row(
    "Data",
    graph(
        "Waiting for data",
        "Share of step time spent waiting for data, of the ten ranks that wait longest.",
        "percentunit",
        Query(
            f'topk(10, rate(opsd_rank_phase_seconds_total{{{RUN}, phase="data"}}[$__rate_interval]))',
            "{{run}} rank {{rank}}",
        ),
    ),
    graph(
        "Tokens so far",
        "Tokens trained on in the last day.",
        "si: tokens",
        Query(f"sum by (run) (increase(opsd_rank_tokens_total{{{RUN}}}[1d]))", "{{run}}"),
    ),
    graph(
        "Data mixture, last hour",
        "Share of each source in the tokens read. A new stage of the mixture shows as a step.",
        "percentunit",
        Query(_share(f"clamp_min(delta({DRAWN}[1h]), 0)"), "{{run}} {{source}}"),
        width=8,
        top=1,
        empty=NO_SOURCES,
    ),
    graph(
        "Data mixture since the start",
        "Share of each source in all tokens that the run has read.",
        "percentunit",
        Query(_share(DRAWN), "{{run}} {{source}}"),
        width=8,
        top=1,
        empty=NO_SOURCES,
    ),
    graph(
        "Passes through each source",
        "Above 1 a source repeats. After about four passes it adds little (Muennighoff et al. 2023).",
        "none",
        Query(f"max by (run, source) (opsd_data_source_epochs{{{RUN}}})", "{{run}} {{source}}"),
        width=8,
        bad_at=4,
        empty=NO_SOURCES,
    ),
)

EVALUATIONS = row(
    "Evaluations",
    graph(
        "Results",
        "Results of the newest evaluated checkpoint, at most 32 for each run.",
        "none",
        Query(f"max by (run, name) (opsd_evaluation_result{{{RUN}}})", "{{run}} {{name}}"),
        width=8,
        floor=None,
        empty=NO_EVALUATION,
    ),
    graph(
        "Against the reference run",
        "Result divided by the reference run's at equal tokens. Below 1: better for a loss, worse for a score.",
        "none",
        Query(
            f"max by (run, name) (opsd_evaluation_result{{{RUN}}}) "
            f"/ max by (run, name) (opsd_evaluation_reference{{{RUN}}})",
            "{{run}} {{name}}",
        ),
        width=8,
        floor=None,
        empty=NO_EVALUATION,
    ),
    graph(
        "Step evaluated last",
        "Lags behind the newest checkpoint while evaluations wait for a free node.",
        "none",
        Query(f"max by (run) (opsd_evaluation_step{{{RUN}}})", "{{run}}"),
        width=8,
        empty=NO_EVALUATION,
    ),
)

CHECKPOINTS = row(
    "Checkpoints",
    graph(
        "Newest checkpoint",
        "Step of the newest checkpoint that is durable on all ranks.",
        "none",
        Query(f"min by (run) (opsd_rank_committed_step{{{RUN}}})", "{{run}}"),
    ),
    graph(
        "Time for checkpoints and evaluations",
        "Share of step time spent on checkpoints and evaluations.",
        "percentunit",
        Query(
            f'run_phase:opsd_rank_phase_seconds:ratio_rate5m{{{RUN}, phase=~"checkpoint|evaluation"}}',
            "{{run}} {{phase}}",
        ),
    ),
)


def build() -> dashboard.Dashboard:
    """Rows: learning, speed, data, evaluations, checkpoints."""
    variables = [label_variable("run", "Run", "opsd_rank_step", within=ALL)]
    return board(
        "opsd-training",
        "opsd / training",
        "Loss, gradient and speed of runs.",
        variables,
        within=ALL,
        rows=(LEARNING, SPEED, DATA, EVALUATIONS, CHECKPOINTS),
    )
