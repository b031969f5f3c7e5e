"""Predicts a run from its settings: memory, time, GPUs, checkpoints, spares and cost. Pure and torch-free.

``layout`` and ``search`` go through the ways to spread it over GPUs, ``memory`` and ``step_time`` say what each takes,
``reliability`` what failures add, ``plan`` puts it together. ``hardware`` and ``reliability`` have the figures that all
of it rests on, each with its source.
"""
