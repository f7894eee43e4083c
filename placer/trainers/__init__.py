"""Save and resume placed tables with other libraries' trainers.

Each module needs the trainer's own package: `placer.trainers.lightning` has `PlacerCallback`,
`placer.trainers.accelerate` has `register_tables`, `placer.trainers.huggingface` has
`PlacerTrainer`.
"""
