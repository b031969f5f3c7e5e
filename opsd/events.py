"""The events of a run: the fields of each line of ``events.jsonl``. Standard library only.

An event has the name of its class in small letters: ``RankExited`` is ``rank_exited``. Writers build the fields by the
class, so that mypy checks them; ``docs/events.md`` and ``docs/schemas/events.schema.json`` are made from the classes.
Programs may add events of other names.

Annotations are evaluated here: typing does not see NotRequired in postponed ones.
"""

import re
from typing import Final, Literal, NotRequired, TypedDict


class RankProcess(TypedDict):
    """A rank and its process."""

    rank: int
    pid: int


class GenerationStarted(TypedDict):
    """The ranks of a generation were started. On several nodes once for the run, and by each launcher for its node."""

    world_size: int
    gpus: int
    """GPUs that this launcher sees; in the run's event those of all nodes and spares"""
    standby: NotRequired[int]
    """ranks started from warm interpreters; only of a launcher"""
    ranks: NotRequired[list[RankProcess]]
    """only of a launcher"""
    nodes: NotRequired[list[str]]
    """by node rank; only of the run"""
    spares: NotRequired[list[str]]
    """only of the run"""


class ProgramError(TypedDict):
    """The exception that ended a rank."""

    type: str
    message: str
    where: str


class RankExited(TypedDict):
    """A rank ended that should not have."""

    rank: int
    pid: int
    exit: str
    """`signal SIGKILL`, `exit code 1`"""
    step: int | None
    """last completed step, null if none"""
    phase: str | None
    culprit: bool
    """whether it caused the failure"""
    error: ProgramError | None
    log_tail: str
    last_step_t: float | None
    """end of its last step"""
    noticed_s: float
    """from its end until the launcher noticed"""


class RecorderVerdict(TypedDict):
    """What PyTorch's flight recorders say of a hang."""

    culprits: list[int]
    cause: str
    confidence: float


class HungRank(TypedDict):
    """A rank during a hang; the phase of a rank without a page is `unknown`."""

    rank: int
    phase: str
    stuck_s: float
    process: str | None
    step: int | None


class HangDetected(TypedDict):
    """The ranks made no progress for longer than the limit."""

    rank: int | None
    """the culprit, null if none stands out"""
    phase: str
    step: int | None
    stuck_s: float
    limit_s: float
    reason: str
    evidence: list[str]
    """sentences"""
    stacks: str | None
    """file with the stacks, null if it could not be written"""
    flight_recorder: RecorderVerdict | None
    ranks: list[HungRank]
    culprit_node: NotRequired[str | None]
    """only of the run: the node of the culprit, null without one"""


class StragglerFound(TypedDict):
    """Ranks are slower than the others, on their node and for the run; written again each minute while it lasts."""

    rank: int | None
    """the first, null if no rank is to blame"""
    ranks: list[int]
    culprit_nodes: list[str]
    gpus: list[int]
    cause: str
    """`slow worker`, `slow GPU`, `slow host`, `pauses of the host`, `slow data`, `unbalanced pipeline stages` or
    `unequal sequence lengths`; never a slow link, for which all ranks of a collective wait equally long"""
    slowdown: float
    """duration of a step in proportion to one without the cause"""
    confidence: float
    evidence: list[str]
    """sentences"""
    advice: str
    source: str
    """`gpu` if the times are those of CUDA events, else `host`"""
    step: int
    compared: int
    """number of ranks"""


class StragglerGone(StragglerFound):
    """The ranks are as fast as the others again."""


class RestartRequested(TypedDict):
    """A person, a planned swap or a spare asks for a restart."""

    reason: str
    swap: NotRequired[str]
    """the node that is replaced"""


class Resumed(TypedDict):
    """The first step after a failure or a requested restart; steps are null if the program does not number them."""

    step: int | None
    """first completed step of the generation"""
    previous_step: int | None
    """highest step before"""
    lost_steps: int | None
    recovered_s: float
    """from the failure to this step"""


class CheckpointCommitted(TypedDict):
    """A checkpoint is whole and durable."""

    step: int


class Stopped(TypedDict):
    """The ranks ended in order, as somebody asked. The run ends with 75, to be started again."""

    signal: str
    """its name, or `control`"""
    step: int | None
    """highest completed step"""


class Finished(TypedDict):
    """The launcher or the run ended."""

    exit_code: int
    reason: str


class CompanionReady(TypedDict):
    """A companion of the run answers."""

    companion: str
    """the beginning of its command"""
    seconds: float
    """since its start"""


class CompanionFailed(TypedDict):
    """A companion of the run has ended, refuses, or hangs, and the generation starts again.

    Or it listens on all addresses, and the run ends.
    """

    companion: str
    why: str


class NodeLost(TypedDict):
    """A node is silent for too long."""

    lost: str
    silent_s: float
    ranks: bool
    """whether it ran ranks, or would have run some of a run that waits for nodes"""


class RanksGone(TypedDict):
    """The ranks of a node ended while the run had no leader."""

    gone: str
    gone_s: float
    """so long ago"""


class LauncherJoined(TypedDict):
    """Another launcher joined the run."""

    joined: str


class SpareJoined(TypedDict):
    """A spare runs ranks from now on."""

    joined: str
    place: int
    """the node rank that it takes"""
    replaces: NotRequired[str]
    """the node that had it"""
    hops: NotRequired[float]
    """mean switches to the run's other nodes, if the topology is known"""
    hops_before: NotRequired[float]
    bad_ways: NotRequired[list[str]]
    """sentences on ways to other nodes that were bad when last measured"""


class SegmentSplit(TypedDict):
    """A segment that should be in one place is in several: its TP and EP groups leave NVLink."""

    first: int
    """node rank"""
    last: int
    places: dict[str, list[str]]
    """nodes by NVLink domain or leaf switch"""


class NodeRetired(TypedDict):
    """A spare replaces a node, for its faults or by request."""

    retired: str
    reason: str


class SwapRefused(TypedDict):
    """A node stays although it was to be replaced."""

    swap: str
    reason: str


class NodeCleared(TypedDict):
    """A node that was retired was drained and given back, and may be used again."""

    cleared: str


class SpareRefused(TypedDict):
    """A spare says that it must not be used."""

    refused: str
    reason: str


class SpareWanted(TypedDict):
    """A swap, or a borrowed node that has to leave, waits for a spare; or a node that is left out has none."""

    swap: str
    reason: str


class CheckpointRejected(TypedDict):
    """A checkpoint is damaged or cannot be read."""

    step: int
    file: str
    why: str


class CheckpointLoaded(TypedDict):
    """The training goes on from a checkpoint."""

    step: int
    tier: str
    """memory, partner, local or remote"""
    load_s: float


class CheckpointFailed(TypedDict):
    """A checkpoint was not saved."""

    step: int | None
    why: str


class CheckpointUnproved(TypedDict):
    """A checkpoint was saved, but its file system did not confirm that it is durable."""

    step: int | None
    why: str


class CheckpointCopyFailed(TypedDict):
    """The copy in another node's memory failed."""

    step: int | None
    why: str


class TrackingFailed(TypedDict):
    """A tracker gets no more numbers until the next start."""

    tracker: str
    why: str


class UpdateSkipped(TypedDict):
    """A step changed no weights."""

    step: int
    why: str


class CheckpointUploaded(TypedDict):
    """A checkpoint was copied to `checkpoint.remote`."""

    step: int
    url: str
    seconds: float


class CheckpointFetched(CheckpointUploaded):
    """A checkpoint was copied from `checkpoint.remote`."""


class CheckpointUploadFailed(TypedDict):
    """Nothing could be copied to `checkpoint.remote`."""

    why: str


class CheckpointFetchFailed(TypedDict):
    """Nothing could be copied from `checkpoint.remote`."""

    why: str


class DataMixture(TypedDict):
    """What was drawn from each source so far; at the start and at each checkpoint, by rank 0."""

    step: int
    tokens: dict[str, int]
    epochs: dict[str, float]


class DataWorkerRestarted(TypedDict):
    """A process that loads data died."""

    pid: int
    why: str
    sample: int
    new_pid: int


class TpShardsEqual(TypedDict):
    """Tensors that are split over these ranks and were initialised at random have shards of the same bits."""

    tensors: list[str]
    ranks: list[int]


class ReplicasDiffer(TypedDict):
    """State that must be equal on these ranks is not."""

    step: int
    tensor: str
    ranks: list[int]
    checksums: list[str]
    """one per rank, in their order"""
    agreed: int | None
    """last step at which all were equal, null if none"""


class ReplayDiffers(TypedDict):
    """A micro-batch came out differently when it was computed again."""

    step: int
    ranks: list[int]
    """those that differ first; more than one if that cannot be told"""
    where: str
    """what differs first"""
    verdict: Literal["gpu", "program", "unknown"]
    checksums: list[str]
    """of both passes"""
    neighbour: int | None
    """the rank that computed the same, null if there is none"""
    neighbour_checksums: list[str]
    """of its two passes"""
    agreed: int | None
    """last step at which no rank differed, null if none"""


class Evaluation(TypedDict):
    """The results of a checkpoint, empty if the evaluation failed."""

    step: int
    results: dict[str, float]
    tokens: NotRequired[int]
    reference: NotRequired[dict[str, float]]
    """the other run's results at equal tokens"""
    errors: NotRequired[dict[str, float]]
    """standard errors of results"""
    why: NotRequired[str]


class Audited(TypedDict):
    """The first batches of a trainer of transformers or TRL were compared with their rows."""

    documents: int
    """that were looked at"""
    findings: list[str]
    notes: list[str]
    mode: str
    """`refuse`, `warn` or `only`"""
    seconds: float


class Rollouts(TypedDict):
    """What a trainer that generates has logged of its rollouts; fields that it does not log are left out."""

    step: int
    reward: NotRequired[float]
    """mean over the answers"""
    flat: NotRequired[float]
    """share of the groups whose rewards have no spread"""
    unscored: NotRequired[int]
    """verifiers that gave no reward to any answer"""
    kl: NotRequired[float]
    """nats a token from the reference model"""
    clipped: NotRequired[float]
    """share of the tokens that are clipped"""
    length: NotRequired[float]
    """mean tokens of an answer"""
    cut: NotRequired[float]
    """share of the answers that are cut off"""
    mismatch: NotRequired[float]
    """mean difference of sampled and trained log-probabilities, nats a token"""


OF_LAUNCHERS: Final[tuple[type, ...]] = (
    GenerationStarted, RankExited, HangDetected, StragglerFound, StragglerGone, RestartRequested, Resumed,
    CheckpointCommitted, CompanionReady, CompanionFailed, Stopped, Finished,
)  # fmt: skip
"""Written by the launcher of a node, and by the leader for the run."""
OF_RUNS: Final[tuple[type, ...]] = (
    NodeLost, RanksGone, LauncherJoined, SpareJoined, SegmentSplit, NodeRetired, SwapRefused, NodeCleared,
    SpareRefused, SpareWanted,
)  # fmt: skip
"""Written by the leader of a run on several nodes."""
OF_RANKS: Final[tuple[type, ...]] = (
    CheckpointRejected, CheckpointLoaded, CheckpointFailed, CheckpointUnproved, CheckpointCopyFailed, TrackingFailed,
    UpdateSkipped, CheckpointUploaded, CheckpointFetched, CheckpointUploadFailed, CheckpointFetchFailed, DataMixture,
    DataWorkerRestarted, TpShardsEqual, ReplicasDiffer, ReplayDiffers, Evaluation, Audited, Rollouts,
)  # fmt: skip
"""Written by ranks of the included trainer and by adapters; each has the field ``rank`` in addition."""


def name_of(event: type) -> str:
    """The name of an event in its line."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", event.__name__).lower()
