"""How long things take that the simulator does not decide. Every figure names where it was measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds. Those of opsd are of docs/benchmarks.md: a tiny model on three nodes, two cores.

    ``program_s`` is what the start of a program takes beyond that, at its real size: loading, communicators, the first
    step. It is not in those benchmarks, and the same for every policy.
    """

    program_s: float = 0.0
    silence_s: float = 1.5
    """A node is lost after so much silence (`opsd bench swap`, --node-timeout)."""
    swap_s: float = 2.15
    """From the last step to the first one with a spare (`opsd bench swap`, p50), the silence included."""
    closed_s: float = 0.0
    """Until a launcher that dies while its node lives is missed, by the end of its connections."""
    succession_s: float = 2.31
    """The same where the leader's node is lost (`opsd bench swap`, p50)."""
    requeue_s: float = 10.79
    """The same without a spare, through Slurm's queue (`opsd bench swap`, p50)."""
    fetch_s: float = 8.64
    """From the request for a spare to its launcher; taken to be as long as that of a requeue."""
    noticed_s: float = 0.024
    """A rank's death (`opsd bench restart`)."""
    restart_s: float = 0.10
    """From a rank's death to the first step on the same nodes (`opsd bench restart`)."""
    agent_s: float = 2.8
    """A fault that kills no rank is found by the agent (`opsd bench detect`, median)."""
    person_s: float = 2334.0
    """Until a person resubmits a run that has ended, or returns a node that opsd would not (OLMo x Lambda on Slurm,
    mean of restarts: 38 min 54 s)."""
    torchrun_restart_s: float = 1.67
    """torchrun, a rank killed (`opsd bench restart`, beside)."""
    torchrun_dies_s: float = 72.0
    """Agents of torchrun notice a dead one after 12 s and end after a wait of 60 s for the store (measured)."""
    torchrun_hang_s: float = 600.0
    """Without opsd NCCL's watchdog ends a hang (torch's default timeout of a process group with NCCL)."""
    slurm_notices_s: float = 393.0
    """Slurm sets a dead node down, with its own settings (docs/slurm.md)."""
    slurm_delay_s: float = 120.0
    """Slurm holds a requeued job back (opsd/slurm/requeue.py)."""

    @property
    def change_s(self) -> float:
        """From the leader's decision to the start of the program, with another node among the ranks."""
        return self.swap_s - self.silence_s

    @property
    def queue_s(self) -> float:
        """From the end of a start to the launchers of the next."""
        return self.requeue_s - self.swap_s

    def generation_s(self, *, changed: bool, succeeded: bool) -> float:
        """From the leader's decision to the start of the program."""
        if changed:
            return self.change_s + (self.succession_s - self.swap_s if succeeded else 0.0)
        return self.restart_s - self.noticed_s
