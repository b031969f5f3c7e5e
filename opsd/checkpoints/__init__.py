"""Checkpoints as files: manifests that can be read, verified and listed without torch."""
