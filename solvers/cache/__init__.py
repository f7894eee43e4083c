"""Plans that are kept, so that the same problem is not searched again; see docs/solvers.md."""
