"""What a pool reports to Ray's metrics, where Prometheus finds it: speed, load, kept sets, weights, losses.

Ray puts `ray_` before each name. Kept sets are observed on a systematic sample of the tokens, so that the cost of a
turn does not grow with its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from keptset.rollout.engine_protocol import EngineLoad
from keptset.schemas.rollout_batch import RolloutBatch

if TYPE_CHECKING:
    from ray.util.metrics import Counter, Gauge, Histogram

PREFIX = "keptset_rollout_"
SIZES = [1.5, 2.5, 4.5, 8.5, 16.5, 32.5, 64.5, 128.5, 256.5, 512.5, 1024.5, 4096.5, 16384.5]
"""Upper bounds of the histogram of |K|, between whole numbers: to which side a bound itself belongs, Ray's versions see
differently."""
MASSES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0]
"""Upper bounds of the histogram of the kept mass."""
LAGS = [0.5, 1.5, 2.5, 4.5, 8.5, 16.5, 32.5]
"""Upper bounds of the histogram of how many versions a batch's oldest token is behind."""
SYNC_SECONDS = [0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100]
TOKENS_OBSERVED = 128
"""Of a turn, for the histograms of kept sets."""


class _Metrics:
    """Metrics that share their tags."""

    def __init__(self, tags: Mapping[str, str]) -> None:
        # Here, since this module is imported where Ray need not be.
        from ray.util import metrics

        self._kinds, self._tags = metrics, dict(tags)

    def _counter(self, name: str, description: str) -> Counter:
        return self._tagged(self._kinds.Counter(PREFIX + name, description=description, tag_keys=tuple(self._tags)))

    def _gauge(self, name: str, description: str) -> Gauge:
        return self._tagged(self._kinds.Gauge(PREFIX + name, description=description, tag_keys=tuple(self._tags)))

    def _histogram(self, name: str, description: str, boundaries: list[float]) -> Histogram:
        return self._tagged(
            self._kinds.Histogram(
                PREFIX + name, description=description, boundaries=boundaries, tag_keys=tuple(self._tags)
            )
        )

    def _tagged(self, metric: Any) -> Any:
        metric.set_default_tags(self._tags)
        return metric


class WorkerMetrics(_Metrics):
    """What an actor knows of itself."""

    def __init__(self, tags: Mapping[str, str]) -> None:
        super().__init__(tags)
        self._tokens = self._counter("tokens", "Tokens drawn.")
        self._responses = self._counter("responses", "Responses ended.")
        self._rate = self._gauge("tokens_per_second", "Tokens drawn per second, in the last turn.")
        self._running = self._gauge("running", "Requests being decoded.")
        self._waiting = self._gauge("waiting", "Requests at an actor that wait for a slot or memory.")
        self._kv_use = self._gauge("kv_use", "Share of the key-value memory promised to running requests.")
        self._kept_size = self._histogram("kept_size", "Ids in the kept set of a token; a sample.", SIZES)
        self._kept_mass = self._histogram("kept_mass", "Probability of the kept set of a token; a sample.", MASSES)

    def turn(self, tokens: int, seconds: float, load: EngineLoad, batch: RolloutBatch | None) -> None:
        """A turn has ended."""
        self._rate.set(tokens / seconds if seconds > 0 else 0.0)
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        if load.kv_use is not None:
            self._kv_use.set(load.kv_use)
        if tokens:
            self._tokens.inc(tokens)
        if batch is None or not len(batch):
            return
        self._responses.inc(len(batch))
        for size in kept_sizes(batch, TOKENS_OBSERVED).tolist():
            self._kept_size.observe(size)
        for mass in kept_masses(batch, TOKENS_OBSERVED).tolist():
            self._kept_mass.observe(mass)


class PoolMetrics(_Metrics):
    """What the driver knows of its actors."""

    def __init__(self, tags: Mapping[str, str]) -> None:
        super().__init__(tags)
        self._queue = self._gauge("queue_length", "Accepted requests that no actor has.")
        self._owed = self._gauge("owed", "Requests that actors have and have not answered.")
        self._actors = self._gauge("actors", "Actors that are loaded.")
        self._restarts = self._counter("restarts", "Actors replaced.")
        self._failures = self._counter("failures", "Requests refused or given up.")
        self._lag = self._histogram("version_lag", "Versions that a batch's oldest token is behind the weights.", LAGS)
        self._sync = self._histogram("weight_sync_seconds", "Time to bring weights to every actor.", SYNC_SECONDS)

    def state(self, queue_length: int, owed: int, actors: int) -> None:
        """What is where now."""
        self._queue.set(queue_length)
        self._owed.set(owed)
        self._actors.set(actors)

    def lag(self, versions: int) -> None:
        """A batch has come whose oldest token is so many versions behind."""
        self._lag.observe(versions)

    def restart(self) -> None:
        """An actor is being replaced."""
        self._restarts.inc()

    def failed(self, requests: int) -> None:
        """Requests were refused or given up."""
        if requests:
            self._failures.inc(requests)

    def sync(self, seconds: float) -> None:
        """Weights have reached every actor."""
        self._sync.observe(seconds)


def kept_sizes(batch: RolloutBatch, most: int) -> npt.NDArray[np.int64]:
    """|K| of up to `most` tokens, evenly spaced; a token drawn from the whole vocabulary is not among them."""
    kept = batch.kept_ids
    if kept is None:
        return np.zeros(0, np.int64)
    lengths = kept.inner.lengths
    if kept.inner.row_valid is not None:
        lengths = lengths[kept.inner.row_valid]
    return evenly(lengths.astype(np.int64), most)


def kept_masses(batch: RolloutBatch, most: int) -> npt.NDArray[np.float64]:
    """Kept mass of up to `most` tokens, evenly spaced."""
    log_mass = batch.log_kept_mass
    if log_mass is None:
        return np.zeros(0)
    values = log_mass.values if log_mass.valid is None else log_mass.values[log_mass.valid]
    return np.minimum(np.exp(evenly(values.astype(np.float64), most)), 1.0)  # float32 can end just above


def evenly(values_N: npt.NDArray[Any], most: int) -> npt.NDArray[Any]:
    """Up to `most` of the values, evenly spaced.

    >>> evenly(np.arange(10), 4).tolist()
    [0, 2, 5, 7]
    """
    if len(values_N) <= most:
        return values_N
    return values_N[np.arange(most) * len(values_N) // most]
