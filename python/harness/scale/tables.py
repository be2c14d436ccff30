"""All tables by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from harness.scale import tables_cluster, tables_model, tables_systems
from harness.scale.context import Context
from harness.scale.table import Table
from harness.scale.values import ScaleError

TABLES: Mapping[str, Callable[[Context], Table]] = {
    each.__name__: each
    for each in (
        tables_model.components,
        tables_model.models,
        tables_model.widths,
        tables_model.overlap,
        tables_model.cache,
        tables_model.splits,
        tables_systems.memory,
        tables_systems.roofline,
        tables_systems.collectives,
        tables_systems.fits,
        tables_systems.steps,
        tables_systems.break_even,
        tables_systems.speculation,
        tables_systems.peers,
        tables_systems.contexts,
        tables_cluster.tp_ep,
        tables_cluster.tp_widths,
        tables_cluster.wide_ep,
        tables_cluster.replicas,
        tables_cluster.loads,
        tables_systems.sources,
    )
}


def build(name: str, context: Context) -> Table:
    """One table. Raises ScaleError where there is none of that name, or where the model does not fit it."""
    if name not in TABLES:
        raise ScaleError(f"no table {name!r}; there are {', '.join(TABLES)}")
    return TABLES[name](context)
