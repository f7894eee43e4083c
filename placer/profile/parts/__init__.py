"""Profiles of logs that are counted in parts, each where it lies."""
