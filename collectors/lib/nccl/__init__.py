"""NCCL of a run: its RAS service, its messages in rank logs, its flight recorder."""
