"""The trainer: a decoder-only language model, its data path and its checkpoints, on FSDP2."""
