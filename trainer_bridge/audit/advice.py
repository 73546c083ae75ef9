"""For each kind of finding: what the audit sees of it, what it cannot see, and how to act. docs/audit.md shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keptset.schemas.findings import FindingKind


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to know about a kind of finding."""

    sees: str
    cannot: str
    act: str


def _advice(sees: str, cannot: str, act: str) -> Advice:
    return Advice(sees=sees, cannot=cannot, act=act)


ADVICE: Mapping[FindingKind, Advice] = {
    FindingKind.LENGTHS: _advice(
        "Two columns that hold one entry a token, or a set and its distribution, have different numbers of entries.",
        "Which of them is right, or where the surplus entry is.",
        "Look at where the recorder cuts or extends responses: stop tokens that are appended, prompts counted in.",
    ),
    FindingKind.NULLS: _advice(
        "A value is missing where one must be, or is there where the token was not sampled.",
        "What the value was.",
        "Have the recorder write b and K for each sampled token and for no other; mark forced tokens as not sampled.",
    ),
    FindingKind.RANGE: _advice(
        "An id is negative or not below the recorded vocabulary size.",
        "Ids beyond the vocabulary where the engine did not record its size.",
        "Compare the vocabulary size of tokenizer, model and record; look for padding ids such as -1.",
    ),
    FindingKind.SORTED: _advice(
        "The ids of a kept set fall or repeat.",
        "Whether an id is doubled or another one is missing.",
        "Have the recorder write each set ascending and without repeats, its log-probabilities in the same order.",
    ),
    FindingKind.EMPTY_SET: _advice(
        "A sampled token has a kept set without members.",
        "What the set was.",
        "Look for sets that are recorded before the filter has run, or cleared before they are copied.",
    ),
    FindingKind.MEMBER: _advice(
        "A sampled token is not in its kept set, so the sampler cannot have drawn it from there.",
        "Whether token or set is wrong; a model tells sets that are shifted or swapped from single faults.",
        "Check that set and token come from the same step and the same row, and that forced tokens are not marked as "
        "sampled. Do not add the token to the set.",
    ),
    FindingKind.LOGPROB: _advice(
        "b is no log-probability over the kept set: not finite, above 0, an engine's marker for missing, or not 0 "
        "where the set has one member.",
        "A wrong b that looks like one; that takes the kept distribution or a model.",
        "Check which distribution b is normalised over, and that tokens without b are null.",
    ),
    FindingKind.MASS: _advice(
        "m is no log of a share, or the set holds less than top_p where top_p alone has cut it.",
        "A wrong m that is plausible; sets cut by top_k or min_p as well.",
        "Check that m is taken before renormalising, and that the set includes the token that crosses top_p.",
    ),
    FindingKind.SET_SIZE: _advice(
        "A kept set has more members than top_k.",
        "Whether the engine kept ties, or did not apply top_k.",
        "If the engine keeps ties this is honest. Else check whether the recorded top_k is the one that was applied.",
    ),
    FindingKind.VERSION_ORDER: _advice(
        "Within a response a token was drawn by older weights than the token before it.",
        "Versions that are wrong and ascend.",
        "Check that versions are taken down per step, and that a retried response does not keep its first part's.",
    ),
    FindingKind.PROMPT: _advice(
        "The first token was sampled, and no prompt is recorded for it.",
        "Prompts that are recorded wrongly.",
        "Record the prompt's ids; without them nobody can score the response.",
    ),
    FindingKind.CONFLICT: _advice(
        "A rollout_id came again with other content, in this file or another.",
        "Which of the two was trained on. The first is the one that counts here.",
        "Give each response an id of its own; look for retries that sample anew under the old id.",
    ),
    FindingKind.DUPLICATE: _advice(
        "A response came again, the same in every column.",
        "Copies under another rollout_id.",
        "Look for files that were copied or read twice, and for retries that store again. Copies count double in a "
        "loss.",
    ),
    FindingKind.SEED_REUSED: _advice(
        "Several responses share a row seed, so their draws use the same random numbers.",
        "Shared random numbers behind different seeds.",
        "Change the base seed from step to step, and let each sample of a prompt have its own.",
    ),
    FindingKind.SUPPORT_ABSENT: _advice(
        "Responses say that no kept set was recorded.",
        "What they were drawn from; ratios over the vocabulary miss the kept mass.",
        "Have the engine record what it kept, or sample these without truncation.",
    ),
    FindingKind.DISTRIBUTION: _advice(
        "A recorded kept distribution does not sum to 1, or gives the token another b, or another H, than recorded; or "
        "H, Var or full_logprobs is a number that none can have.",
        "Rows without their distribution; whether b or the distribution is wrong. A model tells.",
        "Check that the distribution is renormalised after the last filter, that b is taken from it, and that H and "
        "Var are of it too, in nats.",
    ),
    FindingKind.LOGPROB_MISMATCH: _advice(
        "With the weights that drew the token, b is not the score over the recorded set, and no known fault explains "
        "it.",
        "Faults smaller than what honest paths differ by.",
        "Compare the sampler's logits with the model's for one of the examples, step by step.",
    ),
    FindingKind.FULL_VOCABULARY: _advice(
        "b is the log-probability over the whole vocabulary, not over the kept set.",
        "Anything where nothing was cut: both are the same there.",
        "Have the engine return log-probabilities after filtering, or import them with domain `full`.",
    ),
    FindingKind.RAW_LOGITS: _advice(
        "b is taken from the logits before temperature and processors.",
        "Anything at temperature 1 without processors and filters.",
        "Have the engine return processed log-probabilities, or import them with domain `raw`.",
    ),
    FindingKind.RENORMALISED_TWICE: _advice(
        "The log kept mass was subtracted from b twice.",
        "Anything where the kept mass is 1.",
        "Leave out one of the two places that renormalise: usually an adapter that corrects what is right already.",
    ),
    FindingKind.TEMPERATURE_MISSING: _advice(
        "b is the score over the kept set at temperature 1.",
        "Anything at temperature 1.",
        "Take b after the temperature was applied.",
    ),
    FindingKind.TEMPERATURE_ON_LOGPROBS: _advice(
        "b is a log-probability at temperature 1, divided by the temperature.",
        "Anything at temperature 1.",
        "Divide logits by the temperature, then normalise.",
    ),
    FindingKind.PROCESSORS_MISSING: _advice(
        "b is the score without the recorded penalties or biases.",
        "Processors that were applied and not recorded.",
        "Take b after the processors, in the order that is recorded.",
    ),
    FindingKind.MASK_SHIFTED: _advice(
        "Kept sets belong to the tokens before or after.",
        "A shift where neighbouring sets are alike.",
        "Look for an off-by-one between the step whose logits are filtered and the token that is drawn.",
    ),
    FindingKind.MASK_SWAPPED: _advice(
        "Kept sets belong to other responses of the batch.",
        "A swap between responses that are not at hand together.",
        "Look for rows that are reordered between sampling and recording: requests that end, join or are preempted.",
    ),
    FindingKind.WRONG_VERSION: _advice(
        "b was computed with other weights than the recorded version's.",
        "Versions whose weights were not given to the audit.",
        "Check when the version counter steps against when weights are swapped in.",
    ),
    FindingKind.DRAWS: _advice(
        "The places of sampled tokens in their kept distributions, recorded or a model's, are not uniform.",
        "Responses of which neither distribution is known; a generator that is uniform and predictable.",
        "Compare the sampler's draw with the distribution it records: another temperature, greedy steps among sampled "
        "ones, a filter after the record. If responses were chosen by reward, say so (`filtered`).",
    ),
    FindingKind.SURPRISAL: _advice(
        "Sampled tokens are on average more, or less, probable than draws from the recorded distribution are.",
        "Deviations that leave the mean of log p where it is.",
        "As for `draws`; and check that b and H are of the same distribution.",
    ),
    FindingKind.UNIT_MEAN: _advice(
        "The mean of exp(l - b) is not 1, which it is for honest draws whatever the trainer's weights are.",
        "Faults that leave the mean where it is.",
        "Check what b is normalised over, and what the trainer normalises over.",
    ),
    FindingKind.SUPPORT_DRIFT: _advice(
        "The trainer's mass on the recorded kept sets has moved away from the recorded one.",
        "Where it went: no gradient over the kept set sees it.",
        "Sample with newer weights, cut less, or weigh in the loss what leaves the sets.",
    ),
    FindingKind.STALENESS: _advice(
        "Tokens were drawn by weights more versions behind the newest of their stream than asked.",
        "Versions that are not recorded; how far the trainer itself was ahead.",
        "Bound how many rollouts are in flight, abort old ones, or weigh them down by their lag.",
    ),
}
