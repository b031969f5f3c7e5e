"""Raw JSON lines to the trainer's shards: language, quality, exact and near duplicates removed, one corpus a source.

    opsd data run examples/data_pipeline.py

Reads raw/web, raw/books and tokenizer.json; writes shards/web and shards/books. `make data` makes its environment.
"""

from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import (
    ExactDedupConfig,
    ExactDedupFilter,
    ExactDedupSignature,
    ExactFindDedups,
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.filters import GopherQualityFilter, LanguageFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.lid import FT176LID

from opsd.data.shards import ShardIndex, ShardWriter

TASKS = 4  # documents are numbered within a task, so all stages of a source have the same tasks
if Path("lid.176.bin").exists():  # otherwise datatrove downloads it
    FT176LID.MODEL_URL = str(Path("lid.176.bin").absolute())

exact = ExactDedupConfig(content_getter=lambda document: document.text)
minhash = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8)


def stages_of(source: str) -> list[LocalPipelineExecutor]:
    """The stages of one source."""
    work, names = f"work/{source}", "${rank}.jsonl.gz"
    clean, unique = JsonlReader(f"{work}/clean"), JsonlReader(f"{work}/unique")
    steps = [
        (
            [
                JsonlReader(f"raw/{source}"),
                LanguageFilter(["en"]),
                GopherQualityFilter(),
                JsonlWriter(f"{work}/clean", names),
            ],
            TASKS,
        ),
        ([clean, ExactDedupSignature(f"{work}/exact", exact)], TASKS),
        ([ExactFindDedups(f"{work}/exact", f"{work}/copies", exact)], 1),
        ([clean, ExactDedupFilter(f"{work}/copies", exact), JsonlWriter(f"{work}/unique", names)], TASKS),
        ([unique, MinhashDedupSignature(f"{work}/signatures", minhash)], TASKS),
        ([MinhashDedupBuckets(f"{work}/signatures", f"{work}/pairs", config=minhash)], minhash.num_buckets),
        ([MinhashDedupCluster(f"{work}/pairs", f"{work}/near", minhash)], 1),
        ([unique, MinhashDedupFilter(f"{work}/near"), ShardWriter(f"shards/{source}", "tokenizer.json")], TASKS),
        ([ShardIndex(f"shards/{source}")], 1),
    ]
    return [LocalPipelineExecutor(pipeline, tasks=tasks) for pipeline, tasks in steps]


stages = [*stages_of("web"), *stages_of("books")]
# The mixture is the run's, in three stages: run.toml has, below [data],
# stages = [
#     { start = 1, weights = { web = 0.8, books = 0.2 } },
#     { start = 8001, weights = { web = 0.6, books = 0.4 } },
#     { start = 9501, weights = { web = 0.3, books = 0.7 } },
# ]
