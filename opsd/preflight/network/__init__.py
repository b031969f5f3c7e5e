"""Network checks over torch.distributed: collectives, patterns, and the search for the node or link that is bad."""
