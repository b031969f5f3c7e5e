"""A decoder-only language-model trainer: one story, from token shards to evaluated checkpoints.

To be read in this order:

- *What is asked for*: ``settings`` and ``config``.
- *The loop*: ``train``, and what a step is made of: ``accumulate``, ``optimizer``, ``schedule``.
- *The model*: ``model``, ``attention``, ``loss``; over ranks ``world``, ``parallel``, ``regions``; ``audit`` proves it.
- *The data* (``data``): ``shards``, ``order``, ``mixture``, ``sources``; in the training ``loader`` and ``worker``;
  before it ``texts``, ``tokenize``, ``build``.
- *The state*: ``saving`` and ``interval`` say when, ``checkpoint`` what; ``persist``, ``locks``, ``replica`` bring it
  to disk and to another node, ``memory`` keeps it; ``restore`` and ``exchange`` bring it back.
- *What is told*: ``records``, ``metrics``, ``tracking`` and ``trackers``, ``evaluations``.
- *Programs beside a run*: ``evaluate`` and ``harness``, ``huggingface``, ``copies`` and ``tensors``.
"""
