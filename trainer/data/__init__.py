"""Training data: shards of tokens, the order of their sequences, and the process that prefetches them.

Only ``loader``, the trainer's side of the prefetch process, imports torch.
"""
