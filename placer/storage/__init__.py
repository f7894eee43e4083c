"""Save and load what a run trains: checkpoints, and files of tables.

`placer.storage.checkpoint` saves whole models. `placer.storage.table_files` writes the tables of a
checkpoint for servers and other tools, and `placer.storage.serving` reads them. All write through
`placer.files.atomic`.
"""
