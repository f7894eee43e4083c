"""Profiles: what a log says of each table."""
