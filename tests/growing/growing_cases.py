"""A log whose ids come and go, and plans of tables that grow with it."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
from training_cases import QUICK, plan_for

from placer import Plan
from placer.data import open_log
from placer.data.encoding import RawKeys
from placer.data.reader import EncodedLog
from placer.growing import Growing

HOW = Growing(60, admission=2, ttl=3)
CONFIG = replace(QUICK, report_every=1, epochs=2)


def click_samples(samples: int = 640) -> pa.Table:
    """Clicks on items that come into fashion and go, whose ids are texts or any int64."""
    random = np.random.default_rng(0)
    newest = np.arange(samples) // 4
    item = (newest + 40 - random.geometric(0.1, samples)).clip(0)
    tag = (newest[:, None] + 30 - random.geometric(0.1, (samples, 2))).clip(0)
    return pa.table(
        {
            "label": (item + random.integers(0, 3, samples)) % 2,
            "I1": random.lognormal(1, 1, samples).astype(np.float32),
            "item": item * 2**40 - 2**45,
            "last": np.roll(item, 1) * 2**40 - 2**45,
            "tag": [[f"tag-{one}" for one in several] for several in tag],
            "city": random.integers(0, 30, samples),
        }
    )


def growing_log(samples: pa.Table | None = None, how: Growing = HOW) -> EncodedLog:
    mappings = {"item": RawKeys(how.rows), "tag": RawKeys(how.rows)}
    found = open_log(
        click_samples() if samples is None else samples,
        label="label",
        sparse=["item", "last", "tag", "city"],
        dense=["I1"],
        feature_tables={"last": "item"},
        id_mapping={"item": "hash", "tag": "hash", "city": "identity"},
        rows={"item": how.rows, "tag": how.rows},
    )
    encoding = replace(found.encoding, mappings={**found.encoding.mappings, **mappings})
    return EncodedLog(found.source, encoding)


def growing_plan(log: EncodedLog, placement: str = "cached", how: Growing = HOW) -> Plan:
    plan = plan_for(log, placement)  # type: ignore[arg-type]
    orders = {name: order for name, order in plan.row_order.items() if name == "city"}
    ids = {name: own for name, own in plan.hot_ids.items() if name == "city"}
    growing = {"item": how, "tag": how}
    return replace(plan, row_order=orders, hot_ids=ids, growing=growing)
