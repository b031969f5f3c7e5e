"""Alerts about runs: progress, data, losses, checkpoints, evaluations."""

from __future__ import annotations

from opsd.dashboards.alerts.model import Alert, Group, incident, manual

TRAINING = Group(
    "training",
    (
        Alert(
            "ThroughputDrop",
            incident("throughput_drop"),
            summary="A run on {{ $labels.instance }} has lost throughput",
            description="It does fewer tokens a second than before. Check data, then network, then kernels.",
        ),
        Alert(
            "Straggler",
            incident("straggler"),
            summary="A rank on {{ $labels.instance }} is a straggler",
            description="One rank is slower than the others, and the whole run waits for it.",
        ),
        Alert(
            "LossNan",
            incident("loss_nan"),
            summary="The loss of a run on {{ $labels.instance }} is not a number",
            description="Every further step is lost. Return to a checkpoint; find the cause: data or hardware.",
        ),
        Alert(
            "LossSpike",
            incident("loss_spike"),
            summary="The loss of a run on {{ $labels.instance }} has a spike",
            description="Suspect the batch: replay it, and skip it if the spike repeats.",
        ),
        Alert(
            "LossRising",
            incident("loss_rising"),
            summary="The loss of a run on {{ $labels.instance }} rises slowly",
            description="Suspect the learning rate.",
        ),
        Alert(
            "LossPlateau",
            incident("loss_plateau"),
            summary="The loss of a run on {{ $labels.instance }} no longer falls",
            description="It falls less than its past course predicts. Suspect the schedule or the data mixture.",
        ),
        Alert(
            "GradientExplosion",
            incident("gradient_explosion"),
            summary="The gradient of a run on {{ $labels.instance }} explodes",
            description="The gradient norm is far above its past values. The loss usually follows.",
        ),
        Alert(
            "ReplicaDivergence",
            incident("replica_divergence"),
            summary="Replicas of a run on {{ $labels.instance }} have diverged",
            description="State that must be equal on all ranks differs. Only checkpoints from before that are good.",
        ),
        Alert(
            "SilentCorruption",
            incident("silent_corruption"),
            summary="A rank on {{ $labels.instance }} computes wrong without an error",
            description="A micro-batch had other bits when it was computed again. Suspect the GPU or the program.",
        ),
        Alert(
            "TpSeed",
            incident("tp_seed"),
            summary="Tensor-parallel shards of a run on {{ $labels.instance }} are equal",
            description="Shards were initialised with the same seed. The model has less capacity than intended.",
        ),
        Alert(
            "RunUnsupervised",
            'max by (cluster, instance, run) (opsd_run_state{state=~"running|restarting"}) == 1\n'
            "  unless on (cluster, instance, run) opsd_run_up == 1",
            severity="critical",
            hold="15s",
            summary="Run {{ $labels.run }} on {{ $labels.instance }} has lost its launcher",
            description="The launcher died while its run was active. Nothing restarts its ranks if they fail.",
            guide=manual("""
# A run has lost its launcher

## Meaning
`run.json` says that the run is active, but the `opsd launch` process that wrote it no longer exists.

## Impact
Ranks may still train, but nothing detects hangs or restarts ranks, and SIGTERM does not trigger a checkpoint.

## Diagnosis
1. `opsd status`: are ranks of the run alive?
2. `journalctl -k --grep "Killed process"`: did the kernel kill the launcher for lack of memory?
3. `sacct -j JOB --format=JobID,State,ExitCode`: did Slurm end the step?

## Mitigation
- Ranks alive: wait for the next checkpoint (`opsd checkpoint list FOLDER`), then end and restart the job.
- Ranks dead: `scontrol requeue JOB`.
"""),
        ),
    ),
)

DATA = Group(
    "data",
    (
        Alert(
            "DataloaderStall",
            incident("dataloader_stall"),
            summary="A dataloader on {{ $labels.instance }} stalls",
            description="A rank waits for its next batch longer than ever before.",
        ),
        Alert(
            "DataloaderGrowth",
            incident("dataloader_growth"),
            summary="Waiting for data grows on {{ $labels.instance }}",
            description="Batches arrive later and later, or are late repeatedly.",
        ),
    ),
)

CHECKPOINTS = Group(
    "checkpoints",
    (
        Alert(
            "CheckpointStale",
            incident("checkpoint_stale"),
            summary="Checkpoints of a run on {{ $labels.instance }} have stopped",
            description="The run trains without saving. A failure now loses all work since the last checkpoint.",
        ),
        Alert(
            "CheckpointSlow",
            incident("checkpoint_slow"),
            summary="Checkpoints of a run on {{ $labels.instance }} are slow",
            description="Saving blocks the training, takes longer each time, or barely ends before the next save.",
        ),
        Alert(
            "CheckpointCorrupt",
            incident("checkpoint_corrupt"),
            summary="A checkpoint of a run on {{ $labels.instance }} is damaged",
            description="It was set aside, and an older one was loaded if there is one.",
        ),
    ),
)

EVALUATIONS = Group(
    "evaluations",
    (
        Alert(
            "EvalMissing",
            incident("eval_missing"),
            summary="Evaluations of a run on {{ $labels.instance }} are missing",
            description="Checkpoints are no longer evaluated. A run that goes wrong is noticed late.",
        ),
        Alert(
            "EvalLag",
            incident("eval_lag"),
            summary="A run on {{ $labels.instance }} lags behind its reference",
            description="At equal tokens its evaluation results are worse than the reference's: it learns too little.",
        ),
    ),
)
