"""Tables placed by candidates: each is one way to place a table, with its times and bytes.

For steps that take as long as the slowest rank has work, whose shards' times add up, as by
TorchRec's estimates. Strategies and `solvers.PlacerPlanner` ask it.
"""
