"""Drafts by prompt look-up: what followed the last time the request's own text read like this.

A draft costs no model; it is right where a response repeats its prompt or itself. Being wrong costs only the pass over
the drafted tokens, never a token: every token is still drawn from the target's own kept set.

Legend: Q tokens of prompt and response so far.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LONGEST_NGRAM, SHORTEST_NGRAM = 4, 2
"""Tokens that must agree before their continuation is drafted; longer matches are tried first, single tokens never."""


def lookup_draft(sequence_Q: npt.NDArray[np.int32], most: int) -> npt.NDArray[np.int32]:
    """At most `most` tokens that followed the latest earlier occurrence of the sequence's last n-gram; may be empty.

    >>> lookup_draft(np.array([5, 6, 7, 8, 9, 5, 6], np.int32), most=3).tolist()
    [7, 8, 9]
    >>> lookup_draft(np.array([5, 6, 7], np.int32), most=3).tolist()
    []
    """
    for size in range(LONGEST_NGRAM, SHORTEST_NGRAM - 1, -1):
        if most < 1 or len(sequence_Q) <= size:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(sequence_Q[:-1], size)
        found = np.flatnonzero((windows == sequence_Q[-size:]).all(axis=1))
        if len(found):
            begin = int(found[-1]) + size
            return sequence_Q[begin : begin + most].copy()
    return np.zeros(0, np.int32)
