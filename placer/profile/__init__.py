"""Profiles: each table's CDF, lookups per sample and coverage, counted over a log."""
