"""Simulated annealing over assignments."""

from solvers.search.annealing.params import AnnealingParams
from solvers.search.annealing.search import anneal, prepare

__all__ = ["AnnealingParams", "anneal", "prepare"]
