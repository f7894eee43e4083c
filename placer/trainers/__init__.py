"""Placed tables in other people's trainers: what these save, and resume.

Each module needs the trainer's own package: `placer.trainers.lightning` has `PlacerCallback`,
`placer.trainers.accelerate` has `register_tables`, `placer.trainers.huggingface` has
`PlacerTrainer`.
"""
