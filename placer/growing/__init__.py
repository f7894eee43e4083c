"""Growing tables: rows are given to new keys as they are read, and taken back later."""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from placer.growing.key_map import KeyMap as KeyMap
    from placer.growing.options import Growing as Growing
    from placer.growing.options import KeyCounts as KeyCounts
    from placer.growing.working_set import HitRate as HitRate
    from placer.growing.working_set import WorkingSet as WorkingSet
    from placer.growing.working_set import working_sets as working_sets

__getattr__, __all__ = lazy_exports(__name__)
