"""Simulated annealing over assignments."""

from solvers.search.annealing.runs import AROUND, AnnealingParams, anneal, prepare

__all__ = ["AROUND", "AnnealingParams", "anneal", "prepare"]
