"""Pipelines: how the steps of a training run follow one another."""

from typing import Literal, get_args

Pipeline = Literal["look-ahead", "serial"]
"""``look-ahead`` exchanges the ids of the next batch and copies its rows while a batch trains;
``serial`` begins a step after the previous step has ended."""

PIPELINES: tuple[Pipeline, ...] = get_args(Pipeline)
