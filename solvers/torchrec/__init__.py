"""The search of `solvers.PlacerPlanner` over the options that TorchRec's enumerator makes."""
