"""opsd keeps a training run on a GPU cluster at full speed: node agent, job launcher and the tools around them."""

__version__ = "0.1.0"
