"""Save and load what a run trains: checkpoints, and shards in files.

`placer.storage.checkpoint` saves whole models. `placer.storage.shards` saves tables as a plan
divides them. Both write through `placer.files`.
"""
