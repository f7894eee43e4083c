"""Profile distributed logs: count each part on the worker that has it."""
