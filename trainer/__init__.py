"""A trainer for decoder-only language models, from token shards to evaluated checkpoints.

Suggested reading order:

- *Settings*: ``settings`` and ``config``; ``counts`` has the size of a model.
- *The loop*: ``train``, and the parts of a step: ``accumulate``, ``optimizer``.
- *The model*: ``model``, ``attention``, ``loss``; over ranks ``world``, ``parallel``, ``regions``.
- *The data* (``data``): ``shards``, ``stages``, ``mixture``, ``sources``; during training ``loader`` and
  ``worker``; beforehand ``texts``, ``tokenize``, ``build``.
- *The state*: ``saving`` decides when, ``checkpoint`` what; ``persist``, ``parts``, ``locks`` and
  ``replica`` write it to disk and to another node, ``memory`` keeps it; ``restore``, ``load`` and ``exchange`` read it.
- *Reporting*: ``telemetry``, ``metrics``, ``tracking``, ``evaluations``.
- *Other programs*: ``evaluate`` and ``harness``, ``huggingface``, ``duplicate_shards`` and ``tensors``.
"""
