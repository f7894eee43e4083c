"""Refuses to train tables that ranks ought to share and do not."""

import torch.distributed as dist

from placer.errors import BackendError


def refuse_unshared(name: str, world: int) -> None:
    """Raise where a plan was applied before the ranks knew of each other.

    Each rank would then train a whole table by itself, from its own samples alone: DDP averages
    the gradients of parameters, and a placed table is none.

    Parameters
    ----------
    name : str
        Of the table.
    world : int
        How many ranks share it.

    Raises
    ------
    BackendError
    """
    if world > 1 or not (dist.is_available() and dist.is_initialized()):
        return
    ranks = dist.get_world_size()
    if ranks > 1:
        raise BackendError(
            f"table {name!r} was placed before torch.distributed was initialized, so that each of "
            f"{ranks} ranks would train a table of its own; call apply_plan after "
            "init_process_group: after Accelerator() or TrainingArguments() is made, in Lightning "
            "in the module's configure_model"
        )
