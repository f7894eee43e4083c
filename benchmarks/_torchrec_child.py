"""One process that runs TorchRec's planner on a problem or rates a plan, for planners.py.

Reads a job (JSON) from stdin: a case, whether prefetching is on, and either a proposer's name
or the path of a plan of ours. Prints one line of JSON.
"""

import json
import os
import sys
from typing import Any

from _child import peak_bytes
from _problems import Case
from torchrec_planner import Contender, Rating, quiet

from placer import Plan


def shown(rating: Rating | None) -> dict[str, object] | None:
    """What is passed on of a rating."""
    if rating is None:
        return None
    return {
        "step_time_s": rating.step_time_s,
        "fits": rating.fits,
        "hbm_bytes": max(rating.hbm_bytes),
        "ddr_bytes": max(rating.ddr_bytes),
    }


def answer(job: dict[str, Any]) -> dict[str, object]:
    """Plan or rate."""
    contender = Contender(Case(**job["case"]).problem(), prefetch_pipeline=job["prefetch"])
    if "plan" in job:
        return {"rating": shown(contender.rate_plan(Plan.load(job["plan"])))}
    run = contender.run(job["proposer"])
    return {
        "proposer": run.proposer,
        "rating": shown(run.rating),
        "claimed_s": run.claimed_s,
        "seconds": run.seconds,
        "peak_bytes": peak_bytes(),
        "message": run.message,
    }


def main() -> None:
    """Do the job."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # TorchRec prints.
    quiet()
    print(json.dumps(answer(json.load(sys.stdin))), file=results, flush=True)


if __name__ == "__main__":
    main()
