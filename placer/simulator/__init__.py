"""Simulator: judge a plan by replaying a log, counting every lookup without reading weights.

It shares no code with solvers, and no other module uses its results.
"""
