"""A plan judged by a log: every lookup counted, no weight touched.

It shares no code with solvers, and no other module uses its results.
"""
