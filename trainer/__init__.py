"""A small decoder-only language-model trainer: one story from token shards to checkpoints."""
