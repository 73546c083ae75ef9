"""Responses drawn by the oracle from small models of plain NumPy, some of them spoilt by one named fault.

A model here is two tables of logits, by the last token and by the one before: as causal as any, and known in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.columns import Identity
from keptset.schemas.findings import FindingKind
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge import reference
from keptset.trainer_bridge.audit.audited_batch import AuditedBatch
from keptset.trainer_bridge.audit.options import BatchScorer
from keptset.trainer_bridge.audit.unit_audit import audited as judged
from keptset.trainer_bridge.reference.audit import Position, explanations
from keptset.trainer_bridge.scoring.aligned import LogitsOf

VOCAB, PROMPT, LENGTH = 48, 4, 24
ORDER = "repetition_penalty,frequency_penalty,presence_penalty,logit_bias"
SETTINGS = (
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.3, min_p=0.05, repetition_penalty=1.4, frequency_penalty=0.3),
    SamplingParams(top_k=8),
    SamplingParams(temperature=0.7, top_p=0.95, top_k=20, presence_penalty=0.5, logit_bias={3: 1.5, 9: -2.0}),
)


@dataclass(frozen=True)
class TwoTables:
    """A causal model: logits from the last two tokens."""

    last_VV: np.ndarray
    before_VV: np.ndarray

    @classmethod
    def made(cls, seed: int, vocab: int = VOCAB) -> TwoTables:
        rng = np.random.default_rng(seed)
        return cls(rng.normal(0, 2.0, (vocab, vocab)), rng.normal(0, 1.0, (vocab, vocab)))

    def moved(self, seed: int, by: float) -> TwoTables:
        """Other weights, nearby."""
        rng = np.random.default_rng(seed)
        return TwoTables(
            self.last_VV + rng.normal(0, by, self.last_VV.shape),
            self.before_VV + rng.normal(0, by, self.before_VV.shape),
        )

    def logits(self, ids: np.ndarray) -> np.ndarray:
        before = np.concatenate([ids[:1], ids[:-1]])
        return self.last_VV[ids] + self.before_VV[before]


@dataclass(frozen=True)
class TableScorer:
    """`Scorer` over such models."""

    models: dict[int | None, TwoTables]
    max_positions: int | None = None
    noise: float = 0.0
    """Of the path through the cache."""
    calls: list[int | None] = field(default_factory=list)

    @property
    def vocab_size(self) -> int:
        return len(next(iter(self.models.values())).last_VV)

    @property
    def versions(self) -> tuple[int | None, ...]:
        return tuple(self.models) if None in self.models else tuple(sorted(self.models))

    def logits_of(self, ids_P: np.ndarray, lengths_B: np.ndarray, version: int | None) -> LogitsOf:
        self.calls.append(version)
        rows = np.split(ids_P, np.cumsum(lengths_B)[:-1])
        logits = np.concatenate([self.models[version].logits(row) for row in rows])
        return lambda positions: logits[positions].astype(np.float32)

    def stepwise_logits_of(
        self, ids_P: np.ndarray, lengths_B: np.ndarray, prompt_lengths_B: np.ndarray, version: int | None
    ) -> LogitsOf:
        plain = self.logits_of(ids_P, lengths_B, version)
        rng = np.random.default_rng(1)
        return lambda positions: (plain(positions) + rng.normal(0, self.noise, (len(positions), VOCAB))).astype(
            np.float32
        )


@dataclass(frozen=True)
class World:
    """Responses and the weights that drew them."""

    responses: list[Response]
    model: TwoTables

    def batch(self) -> RolloutBatch:
        builder = BatchBuilder(Identity(vocab_size=VOCAB, processor_order=ORDER))
        for response in self.responses:
            builder.add(response)
        return builder.build()

    def position(self, row: int, at: int, *, other_versions: Sequence[TwoTables] = ()) -> Position:
        """Everything about one token, for the oracle."""
        response = self.responses[row]
        ids = np.concatenate([response.prompt_token_ids, response.token_ids])
        sets = sets_of(response)
        near = [sets[p] for p in (at - 1, at + 1) if 0 <= p < len(sets)]
        where = PROMPT + at - 1
        return Position(
            logits_V=self.model.logits(ids)[where],
            prompt_ids=response.prompt_token_ids,
            response_ids=response.token_ids[:at],
            params=response.params,
            token=int(response.token_ids[at]),
            kept_ids=sets[at],
            log_kept_mass=float(response.log_kept_mass[at]),
            neighbour_sets=near,
            other_versions=[model.logits(ids)[where] for model in other_versions],
        )

    def with_b(self, rows: Sequence[int], b_of: Callable[[int, int], float]) -> World:
        """b replaced in some responses."""
        responses = list(self.responses)
        for row in rows:
            b = np.array([b_of(row, at) for at in range(len(responses[row].token_ids))])
            responses[row] = replace(responses[row], behavior_logprobs=b)
        return replace(self, responses=responses)

    def with_sets(self, rows: Sequence[int], sets_for: Callable[[int], list[list[int]]]) -> World:
        """Kept sets replaced in some responses."""
        responses = list(self.responses)
        for row in rows:
            sets = sets_for(row)
            responses[row] = replace(
                responses[row],
                kept_offsets=np.cumsum([0, *map(len, sets)]),
                kept_ids=np.array([i for s in sets for i in s], np.int64),
            )
        return replace(self, responses=responses)

    def with_distributions(self) -> World:
        """The whole kept distribution of each token recorded, as the oracle has it."""
        return replace(
            self,
            responses=[
                replace(response, kept_logprobs=np.concatenate(self.distributions(row)))
                for row, response in enumerate(self.responses)
            ],
        )

    def with_entropies(self) -> World:
        """H and Var(log p) of each token recorded."""
        responses = []
        for row, response in enumerate(self.responses):
            logp = self.distributions(row)
            entropy = np.array([-np.sum(np.exp(p) * p) for p in logp])
            var = np.array([np.sum(np.exp(p) * (p + h) ** 2) for p, h in zip(logp, entropy, strict=True)])
            responses.append(replace(response, kept_entropy=entropy, kept_logprob_var=var))
        return replace(self, responses=responses)

    def distributions(self, row: int) -> list[np.ndarray]:
        """log p over the recorded set of each token of a response."""
        response, found = self.responses[row], []
        for at, members in enumerate(sets_of(response)):
            seen = self.position(row, at)
            z = reference.process(seen.logits_V, list(seen.prompt_ids), list(seen.response_ids), response.params)
            tempered = z[members] / response.params.temperature
            found.append(tempered - np.logaddexp.reduce(tempered))
        return found

    def with_versions(self, version: int) -> World:
        return replace(
            self, responses=[replace(r, policy_versions=np.full(len(r.token_ids), version)) for r in self.responses]
        )


def sets_of(response: Response) -> list[list[int]]:
    return [part.tolist() for part in np.split(np.asarray(response.kept_ids), response.kept_offsets[1:-1])]


def draw_world(
    seed: int,
    rows: int,
    settings: Sequence[SamplingParams] = SETTINGS,
    *,
    model: TwoTables | None = None,
    bits: int | None = None,
) -> World:
    """Responses of LENGTH tokens drawn by the oracle, the settings in turn, from logits of `bits` significant bits."""
    rng = np.random.default_rng(seed)
    model = model or TwoTables.made(5)
    responses = []
    for row in range(rows):
        params = settings[row % len(settings)]
        ids = rng.integers(0, VOCAB, PROMPT).tolist()
        b, m, sets = [], [], []
        for _ in range(LENGTH):
            z = model.last_VV[ids[-1]] + model.before_VV[ids[-2]]
            z = z if bits is None else _rounded(z, bits)
            kept = reference.truncate(reference.process(z, ids[:PROMPT], ids[PROMPT:], params), params)
            token = reference.draw(kept, rng.random())
            b.append(kept.logprobs[kept.kept_ids.tolist().index(token)])
            m.append(kept.log_kept_mass)
            sets.append(kept.kept_ids.tolist())
            ids.append(token)
        responses.append(
            Response(
                rollout_id=f"rollout-{row}",
                prompt_id=f"prompt-{row}",
                prompt_token_ids=np.array(ids[:PROMPT]),
                token_ids=np.array(ids[PROMPT:]),
                behavior_logprobs=np.array(b),
                log_kept_mass=np.array(m),
                kept_offsets=np.cumsum([0, *map(len, sets)]),
                kept_ids=np.array([i for s in sets for i in s], np.int64),
                policy_versions=np.zeros(LENGTH, np.int64),
                finish_reason="length",
                params=params,
            )
        )
    return World(responses, model)


def _rounded(values: np.ndarray, bits: int) -> np.ndarray:
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * 2.0**bits) / 2.0**bits, exponent)


FAULTS_OF_B = (
    FindingKind.FULL_VOCABULARY,
    FindingKind.RAW_LOGITS,
    FindingKind.RENORMALISED_TWICE,
    FindingKind.TEMPERATURE_MISSING,
    FindingKind.TEMPERATURE_ON_LOGPROBS,
    FindingKind.PROCESSORS_MISSING,
    FindingKind.WRONG_VERSION,
)


def plant(world: World, kind: FindingKind, rows: Sequence[int]) -> World:
    """The world with these responses wholly spoilt by one fault."""
    if kind is FindingKind.MASK_SHIFTED:
        return world.with_sets(rows, lambda row: (s := sets_of(world.responses[row]))[1:] + s[-1:])
    if kind is FindingKind.MASK_SWAPPED:
        partner = {row: row ^ 4 for row in rows}
        return world.with_sets(rows, lambda row: sets_of(world.responses[partner[row]]))
    other = (world.model.moved(17, 0.3),) if kind is FindingKind.WRONG_VERSION else ()

    def b_of(row: int, at: int) -> float:
        forms = explanations(world.position(row, at, other_versions=other))[kind]
        return forms[0] if forms else float(world.responses[row].behavior_logprobs[at])

    return world.with_b(rows, b_of)


def audited(batch: RolloutBatch, scorer: BatchScorer | None = None) -> AuditedBatch:
    """A batch as the runner hands it over, with its scores."""
    return judged(batch, scorer=scorer)


class Scored:
    """What the tests of scored checks share."""

    World = World
    TwoTables = TwoTables
    TableScorer = TableScorer
    faults_of_b = FAULTS_OF_B
    settings = SETTINGS
    order = ORDER
    draw = staticmethod(draw_world)
    plant = staticmethod(plant)
    audited = staticmethod(audited)
    sets_of = staticmethod(sets_of)


@pytest.fixture(scope="session")
def scored() -> type[Scored]:
    """Worlds, faults and scorers."""
    return Scored


@pytest.fixture(scope="session")
def clean(scored: type[Scored]) -> World:
    """Honest responses, each setting four times."""
    return draw_world(3, 16)
