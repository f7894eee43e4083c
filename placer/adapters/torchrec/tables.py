"""Models whose tables TorchRec has to hold in two parts, in another order, or with a key map."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from placer.adapters.torchrec.export import require_torchrec
from placer.adapters.torchrec.parts import Staged, parts_of
from placer.errors import PlanMismatchError
from placer.plan.order import Ranks
from placer.plan.plan import Plan
from placer.tables import Table

if TYPE_CHECKING:
    from placer.adapters.torchrec.models import TableOfModel


def split_tables(module: Any, plan: Plan, *, staged_as: Staged | None = None) -> Any:
    """Return the model with those tables split that the plan has in parts, for `to_sharding_plan`.

    An embedding collection with such a table becomes a `SplitCollection`, which takes ids and
    returns rows as before and holds ``C3__hot`` and ``C3__cold`` for ``C3``, or ``C3__ranked``
    where the rows of one table are divided in the order of a profile. Weights are copied, unless
    they are on the meta device. Optimizers are applied afterwards.

    Parameters
    ----------
    module : nn.Module
        Not sharded yet. Its embedding collections are replaced in place, all other modules are
        left alone.
    staged_as : {"uva", "cached"}, optional
        As in `to_sharding_plan`.

    Returns
    -------
    nn.Module
        `module`, or what replaces it if it is an embedding collection itself.

    Raises
    ------
    PlanMismatchError
        If TorchRec has no such placement, or a table cannot be split.
    BackendError
        If torchrec is not installed.
    """
    require_torchrec()
    from placer.adapters.torchrec.models import collections_of, tables_of
    from placer.adapters.torchrec.modules import SplitCollection
    from placer.adapters.torchrec.state import split_state_dict

    parts = {table.name: parts_of(plan, table, staged_as=staged_as) for table in plan.tables}
    split = {name: own for name, own in parts.items() if any(part.remapped for part in own)}
    tables = tables_of(module)
    for name in split:
        _require_alike(plan.tables_by_name[name], tables)
    # All are made before the first is installed, so that an error leaves the model as it was.
    made = []
    for path, collection in collections_of(module):
        here = [name for name in split if tables[name].path == path]
        if not here:
            continue
        new = SplitCollection(
            collection,
            {name: split[name] for name in here},
            {name: Ranks.in_plan(plan, name) for name in here},
        )
        if not next(collection.parameters()).is_meta:
            new.load_state_dict(split_state_dict(collection.state_dict(), new))
        made.append((path, new))
    for path, new in made:
        if not path:
            return new
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, new)
    return module


def managed_collisions(
    options: Mapping[str, Mapping[str, Any]], configs: Sequence[Any], device: Any
) -> Any:
    """Return TorchRec's `ManagedCollisionCollection` of tables that grow.

    Parameters
    ----------
    options : mapping of table name to arguments
        ``managed_collisions`` of `document`, or of the file of `placer export --to torchrec`.
    configs : sequence of EmbeddingBagConfig or EmbeddingConfig
        Of the same tables, with as many ``num_embeddings`` as the options have ``zch_size``.
    device : torch.device

    Raises
    ------
    BackendError
        If torchrec is not installed.
    """
    require_torchrec()
    from torchrec.modules import hash_mc_evictions as evictions
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
    from torchrec.modules.mc_modules import ManagedCollisionCollection

    modules = {
        name: HashZchManagedCollisionModule(
            **{
                **own,
                "eviction_policy_name": evictions.HashZchEvictionPolicyName(
                    own["eviction_policy_name"]
                ),
                "eviction_config": evictions.HashZchEvictionConfig(**own["eviction_config"]),
            },
            device=device,
        )
        for name, own in options.items()
    }
    return ManagedCollisionCollection(modules, configs)


def _require_alike(table: Table, tables: "Mapping[str, TableOfModel]") -> None:
    """Raise unless the model has a table of the same rows and dim."""
    if table.name not in tables:
        raise PlanMismatchError(f"table {table.name!r} is in the plan but not in the model")
    config = tables[table.name].config
    if (config.num_embeddings, config.embedding_dim) != (table.rows, table.dim):
        raise PlanMismatchError(
            f"table {table.name!r} is {table.rows} × {table.dim} in the plan but "
            f"{config.num_embeddings} × {config.embedding_dim} in the model"
        )
