"""An engine that is not keptset's own: it draws from row seeds alone, and comes to grief where a prompt says so."""

import os
import resource
import signal
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from keptset.rollout.request import Request
from keptset.rollout.sampling import uniforms
from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.columns import Identity
from keptset.schemas.errors import InvalidInput
from keptset.schemas.sampling_params import SamplingParams

VOCAB = 64
KILL, HANG, MEMORY, RAISE, REFUSE, TWICE = range(40, 46)
"""Prompts that begin with one of these ids kill the process, and so on; with `x_once`, a file, only the first time."""


class ScriptedEngine:
    """One token per request and step; a step takes `pause` seconds. Every kept set has four ids."""

    def __init__(self, pause: float = 0.0, slots: int = 4, version: int = 0) -> None:
        self.version, self.tokens_drawn = version, 0
        self.weights: dict[str, np.ndarray] = {}
        self._pause, self._slots = pause, slots
        self._waiting: deque[Request] = deque()
        self._running: dict[str, tuple[Request, list[int], list[int]]] = {}
        self._aborted: set[str] = set()

    @property
    def unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    def submit(self, request: Request) -> None:
        if request.prompt_token_ids[0] == REFUSE:
            raise InvalidInput(f"prompt {request.prompt_id} is refused")
        self._waiting.append(request)

    def abort(self, rollout_id: str) -> bool:
        self._aborted.add(rollout_id)
        return True

    def update_weights(self, version, weights, *, running, cache) -> None:
        if "w" not in weights:
            raise InvalidInput("weight 'w' is missing")
        self.version, self.weights = version, weights

    def advance(self, seconds: float):
        builder, begin = BatchBuilder(Identity(vocab_size=VOCAB, engine="scripted")), time.monotonic()
        while self.unfinished:
            for response in self._step():
                builder.add(response)
            if time.monotonic() - begin >= seconds:
                break
        return builder.build() if len(builder) else None

    def _step(self):
        while self._waiting and len(self._running) < self._slots:
            request = self._waiting.popleft()
            _act(request)
            self._running[request.rollout_id] = (request, [], [])
        time.sleep(self._pause)
        for name, (request, tokens, versions) in list(self._running.items()):
            ends = name in self._aborted
            self._aborted.discard(name)
            if not ends:
                at = len(request.prompt_token_ids) + len(tokens)
                tokens.append(int(uniforms(np.array([request.params.seed]), np.array([at]))[0] * VOCAB))
                versions.append(self.version)
                self.tokens_drawn += 1
            if ends or len(tokens) == request.params.max_new_tokens:
                if request.prompt_token_ids[0] != TWICE or ends:
                    del self._running[name]
                else:
                    self._running[name] = (request, tokens[:-1], versions[:-1])
                yield _response(request, tokens, versions, "abort" if ends else "length")


def _act(request: Request) -> None:
    once = request.extra.get("x_once")
    if once is not None and Path(once).exists():
        return
    if once is not None:
        Path(once).touch()
    deed = request.prompt_token_ids[0]
    if deed == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == HANG:
        time.sleep(1e6)
    if deed == RAISE:
        raise RuntimeError("the device is gone")
    if deed == MEMORY:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, -1))
        np.ones(2**30)


def _response(request: Request, tokens: list[int], versions: list[int], reason: str) -> Response:
    first = np.array(tokens, np.int32) // 4 * 4
    count = len(tokens)
    return Response(
        rollout_id=request.rollout_id,
        prompt_id=request.prompt_id,
        group_id=request.group_id,
        sample_index=request.sample_index,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=np.array(tokens, np.int32),
        behavior_logprobs=np.full(count, -np.log(4), np.float32),
        log_kept_mass=np.full(count, np.log(0.75), np.float32),
        kept_entropy=np.full(count, np.log(4), np.float32),
        kept_logprob_var=np.zeros(count, np.float32),
        kept_offsets=np.arange(count + 1) * 4,
        kept_ids=(first[:, None] + np.arange(4)).reshape(-1).astype(np.int32),
        policy_versions=np.array(versions, np.int32),
        finish_reason=reason,
        params=request.params,
        seed=request.params.seed,
    )


@pytest.fixture(scope="session")
def by_value():
    """Ray's workers cannot import this file; its classes travel whole."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="session")
def scripted(by_value):
    """`scripted(pause=...)` is a factory of ScriptedEngine for a pool."""

    def made(**settings):
        return lambda: ScriptedEngine(**settings)

    return made


@pytest.fixture(scope="session")
def ask():
    """`ask(count, first=3, ...)`: requests whose prompts begin with that id."""

    def made(count, first=3, *, name="p", tokens=4, **fields):
        prompt = np.array([first, 1, 2], np.int32)
        params = SamplingParams(top_p=0.7, max_new_tokens=tokens)
        return [
            Request(prompt_id=f"{name}{number}", prompt_token_ids=prompt, params=params, **fields)
            for number in range(count)
        ]

    return made


@pytest.fixture(scope="session")
def answers():
    """`answers(requests)`: rollout id to tokens, as one engine alone gives them."""

    def of(requests):
        engine = ScriptedEngine()
        for request in requests:
            engine.submit(request.resolved(0))
        batch = engine.advance(1e6)
        return {name: batch.token_ids[row].tolist() for row, name in enumerate(batch.rollout_ids)}

    return of
