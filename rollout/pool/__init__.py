"""Many engines on Ray: prompts stream in, batches stream out, and what a lost actor takes with it is done again."""

from keptset.rollout.pool.delivery import Delivery
from keptset.rollout.pool.resources import local_actors
from keptset.rollout.pool.rollout_pool import RolloutPool
from keptset.rollout.pool.weight_sync import WeightSync

__all__ = ["Delivery", "RolloutPool", "WeightSync", "local_actors"]
