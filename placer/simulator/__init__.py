"""Judges a plan by a log: counts every lookup and reads no weight.

It shares no code with solvers, and no other module uses its results.
"""
