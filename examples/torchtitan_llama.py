"""torchtitan with a configuration of one's own: a small Llama 3 on text files, with checkpoints.

    cd examples
    opsd launch --standalone --nproc-per-node gpu -m opsd.adapters.torchtitan \
        --module torchtitan_llama --config small --hf_assets_path TOKENIZER --dataloader.dataset_path TEXT

TOKENIZER is a folder with a tokenizer.json, TEXT a file. ``opsd.adapters.torchtitan`` takes the arguments of
``torchtitan.train``; the configurations of torchtitan need no file: ``--module llama3 --config llama3_8b``.
"""

from datasets import Dataset, load_dataset
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer


def load(path: str) -> Dataset:
    """The lines of the file ``path``."""
    return load_dataset("text", data_files=path, split="train")


DATASETS["lines"] = DatasetConfig(path="text.txt", loader=load, sample_processor=lambda sample: sample["text"])


def small() -> Trainer.Config:
    """The debug model of torchtitan, 1000 steps, a checkpoint each 100."""
    config = llama3_debugmodel()
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="lines")
    config.training.steps = 1000
    config.checkpoint.enable, config.checkpoint.interval = True, 100
    return config
