"""Scores over recorded kept sets.

`plan` decides what each token needs. From logits, `kept_softmax` and `full_softmax` are the maths and `run` ties them
to a gradient; from hidden states, `kept_pairs`, `kept_members` and `vocabulary_chunks` are, `partial_softmax` joins
parts (chunks, ranks), `hidden_pass` ties, and `run_hidden` chooses: on a host NumPy does what it can (`host_pass`,
`host_pairs`). A hand per framework (`numpy_hand`, `paddle_hand`, `torch_hand`, and their
`_head_hand`) does what frameworks do differently. No framework is imported before an array of it arrives.
"""

from keptset.trainer_bridge.scoring.aligned import score_aligned, score_aligned_full_vocabulary
from keptset.trainer_bridge.scoring.aligned_hidden import (
    score_aligned_from_hidden,
    score_aligned_full_vocabulary_from_hidden,
)
from keptset.trainer_bridge.scoring.from_hidden import score_from_hidden, score_full_vocabulary_from_hidden
from keptset.trainer_bridge.scoring.from_logits import score_from_logits, score_full_vocabulary
from keptset.trainer_bridge.scoring.head import Head, Shard
from keptset.trainer_bridge.scoring.head_gradient import DenseHeadGradient, RowSparseHeadGradient
from keptset.trainer_bridge.scoring.run import Scores

__all__ = [
    "DenseHeadGradient",
    "Head",
    "RowSparseHeadGradient",
    "Scores",
    "Shard",
    "score_aligned",
    "score_aligned_from_hidden",
    "score_aligned_full_vocabulary",
    "score_aligned_full_vocabulary_from_hidden",
    "score_from_hidden",
    "score_from_logits",
    "score_full_vocabulary",
    "score_full_vocabulary_from_hidden",
]
