"""Simulated annealing over assignments."""

from solvers.search.annealing.search import anneal, prepare

__all__ = ["anneal", "prepare"]
