"""What the holders gave back becomes each feature's output."""

import torch
from torch import Tensor

from placer.executor.distributed.placement.channels import Channels
from placer.executor.distributed.sharded_batch import ShardedBatch
from placer.executor.distributed.survey import Survey
from placer.executor.lookups.batch_reads import FeatureRead
from placer.executor.lookups.pooling import segment_max


def combine(
    flat: Tensor,
    step: ShardedBatch,
    channels: Channels,
    survey: Survey,
) -> dict[str, Tensor]:
    """Outputs by feature: float32, shape (samples, dim), or (lookups, dim) without pooling.

    Partial sums are added in the order of a column slice's targets, whoever holds them. Ordinary
    operations, so that autograd differentiates them.
    """
    came: dict[tuple[int, int, int], Tensor] = {}
    pooled: dict[tuple[int, int], bool] = {}
    shapes = [
        (rows, channel.target.width)
        for (_, channel), rows in zip(channels.sent, step.sent_rows, strict=True)
    ]
    parts = torch.split(flat, [rows * width for rows, width in shapes]) if shapes else ()
    for (_, channel), shape, part in zip(channels.sent, shapes, parts, strict=True):
        came[channel.feature, channel.columns, channel.position] = part.view(shape)
        pooled[channel.feature, channel.columns] = channel.pooled
    results = {}
    for index, feature in enumerate(survey.features):
        table = survey.routes.get(feature.table)
        if table is None:  # It has no rows, so all bags are empty.
            rows = 0 if feature.pooling == "none" else step.bags.batch_size
            dim = survey.plan.tables_by_name[feature.table].dim
            column_slices = [flat.new_zeros((rows, dim)) + flat[:0].sum()]
        else:
            column_slices = [
                _column_slice(
                    feature,
                    pooled[index, number],
                    [came[index, number, place] for place in range(len(columns.targets))],
                    step.routes[index][number],
                    step.bags.offsets_of(index),
                )
                for number, columns in enumerate(table.column_slices)
            ]
        whole = column_slices[0] if len(column_slices) == 1 else torch.cat(column_slices, 1)
        if feature.pooling != "max":  # Else each column slice is of maxima already.
            whole = step.bags.output(index, feature, whole)
        results[feature.name] = whole
    return results


def _column_slice(
    feature: FeatureRead, pooled: bool, parts: list[Tensor], order: Tensor | None, offsets: Tensor
) -> Tensor:
    """Return one column slice of a feature: sums, maxima, or rows in the order of the batch.

    Where a holder alone has all rows of a bag, it has pooled them, be it their maximum.
    """
    if pooled:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total
    rows = torch.cat(parts) if len(parts) > 1 else parts[0]
    if order is not None:
        order = order.long()
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=back.device)
        rows = rows[back]
    return rows if feature.pooling == "none" else segment_max(rows, offsets - offsets[0])
