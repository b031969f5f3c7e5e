"""Models of Hugging Face: read as the beginning of a run, written from its checkpoints."""
