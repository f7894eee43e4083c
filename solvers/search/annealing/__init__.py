"""Simulated annealing over assignments."""

from solvers.search.annealing.runs import AnnealingParams, anneal, prepare

__all__ = ["AnnealingParams", "anneal", "prepare"]
