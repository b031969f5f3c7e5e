"""What becomes of the run: generations over all its nodes."""
