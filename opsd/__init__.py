"""opsd keeps a training run on a GPU cluster at full speed: node agent, job launcher and the tools around them."""

from opsd.own_packages import prefer_own_packages

__version__ = "0.1.0"
OWN_PROCESS = prefer_own_packages()
"""Whether this is a process of opsd, and no program that imports opsd.

An assignment: what a standby imports beforehand ends at a statement that is a call (``launch/ranks/imports.py``).
"""
