"""Which ranks are lost: those that do not say that they, too, have found the job broken."""

import re
import threading
import time
from collections.abc import Sequence

import torch.distributed as dist

from placer.errors import BackendError

WAIT_S = 5.0
"""How long the words of other ranks are waited for, in seconds: with a hang, their timeouts end
as far apart as the ranks had come to the exchange."""
_POLL_S = 0.05
_KEY = "placer found a rank lost: "


def lost_ranks(rank: int, members: Sequence[int], wait_s: float = WAIT_S) -> list[int]:
    """Return ranks of a group that are lost, as far as can be known; empty where nobody knows.

    Every rank that finds an exchange broken calls this. It leaves a word in the store by which the
    processes met, and waits until one other rank alone has left none. Of more than one, all are
    given whose words are missing after `wait_s`; some of them may yet wait for an exchange
    of their own. Where two ranks are all there are, the other one is lost. Where a group has two
    and there are more, the other one may have left because of a rank that is not in the group.

    Parameters
    ----------
    rank : int
        This one's place in `members`.
    members : sequence of int
        The group's ranks, as the default group numbers them.

    Returns
    -------
    list of int
        Places in `members`, or the number of one rank that is not among them.

    Examples
    --------
    >>> lost_ranks(0, [0, 1])
    [1]
    """
    others = [place for place in range(len(members)) if place != rank]
    is_sure = len(others) < 2
    # Ranks outside of the group may look for this one's word.
    if is_sure and not (dist.is_initialized() and dist.get_world_size() > len(members)):
        return others
    found: list[int] = []
    # The store may have been in the lost process: what asks it might never come back.
    asking = threading.Thread(target=_ask, args=(rank, members, wait_s, found), daemon=True)
    asking.start()
    asking.join(wait_s + 1)
    return list(found) or (others if is_sure else [])


def rank_lost(
    rank: int, members: Sequence[int], doing: str, error: Exception, within: str = "in time"
) -> BackendError:
    """Return the error to raise where ranks no longer answer: what failed, and which they are.

    Parameters
    ----------
    rank, members
        See `lost_ranks`.
    doing : str
        What failed, as the subject of a sentence.
    error : Exception
        Of the collective.
    within : str
        How long the others were waited for.

    Examples
    --------
    >>> failed = RuntimeError("[/src/pair.cc:53] Connection closed")
    >>> print(rank_lost(0, [0, 1], "exchanging ids", failed))  # doctest: +ELLIPSIS
    rank 0 of 2: exchanging ids failed: Connection closed. Rank 1 died, or did not come in time, ...
    """
    lost = lost_ranks(rank, members)
    who = f"Rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}" if lost else "Another rank"
    return BackendError(
        f"rank {rank} of {len(members)}: {doing} failed: {reason_of(error)}. {who} died, or did "
        f"not come {within}, or ended earlier: are the loaders equally long? See the output of all "
        "ranks, and start again from the last checkpoint"
    )


def reason_of(error: Exception) -> str:
    """Return what a failed collective says, less the place in its source and its advice.

    >>> reason_of(RuntimeError("[/src/pair.cc:53] Connection closed. This is typically caused by"))
    'Connection closed'
    """
    first = str(error).partition("\n")[0].partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", first) or type(error).__name__


def _ask(rank: int, members: Sequence[int], wait_s: float, found: list[int]) -> None:
    """Leave a word, and put the places of those without one into `found`."""
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(_KEY + str(members[rank]), "1")
        silent = [place for place in range(len(members)) if place != rank]
        outside = [one for one in range(dist.get_world_size()) if one not in members]
        lost_anyway = 1 if len(members) > 2 else 0
        until = time.monotonic() + wait_s
        while len(silent) > lost_anyway and time.monotonic() < until:
            silent = [p for p in silent if not store.check([_KEY + str(members[p])])]
            time.sleep(_POLL_S)
        while not silent and len(outside) > 1 and time.monotonic() < until:
            outside = [one for one in outside if not store.check([_KEY + str(one)])]
            time.sleep(_POLL_S)
    except (RuntimeError, ValueError):  # The store is gone, or there never was one.
        return
    found[:] = silent or (outside if len(outside) == 1 else [])
