"""Simulated annealing over assignments."""

from solvers.search.annealing.search import AnnealingParams, anneal, prepare

__all__ = ["AnnealingParams", "anneal", "prepare"]
