"""Network checks over torch.distributed: collectives, patterns, and the search for a bad node or link."""
