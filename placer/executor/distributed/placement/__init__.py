"""Divide a plan over processes: which process holds which rows and columns."""
