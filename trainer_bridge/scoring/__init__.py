"""Scores over recorded kept sets.

`plan` decides what each token needs, `kept_softmax` and `full_softmax` are the maths, `run` ties them to a gradient,
and a hand per framework (`numpy_hand`, `paddle_hand`) does what frameworks do differently. No framework is imported
before logits of it arrive.
"""

from keptset.trainer_bridge.scoring.aligned import score_aligned, score_aligned_full_vocabulary
from keptset.trainer_bridge.scoring.from_logits import score_from_logits, score_full_vocabulary
from keptset.trainer_bridge.scoring.run import Scores

__all__ = ["Scores", "score_aligned", "score_aligned_full_vocabulary", "score_from_logits", "score_full_vocabulary"]
