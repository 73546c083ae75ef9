"""transformers: what generate() returns, stood in for by NumPy arrays, and in one test made by transformers itself."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from keptset.schemas.adapters import Stated, from_transformers
from keptset.schemas.columns import Identity
from keptset.schemas.errors import InvalidInput, SchemaError
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge import reference

V, EOS, PAD = 6, 5, 0
CONFIG: dict[str, Any] = {"do_sample": True, "temperature": 0.5, "top_k": 3, "eos_token_id": EOS, "max_new_tokens": 4}
STATED = Stated(identity=Identity(vocab_size=V), others_off=True)


def output(rows: list[list[int]], prompt: list[list[int]], **fields: Any) -> SimpleNamespace:
    """A call whose sets are the three ids up from the token, cyclically, at logits 1, 0, -1 over temperature 0.5."""
    steps = len(rows[0])
    raw = np.full((steps, len(rows), V), -3.0, np.float32)
    for b, row in enumerate(rows):
        for t, token in enumerate(row):
            raw[t, b, [token, (token + 1) % V, (token + 2) % V]] = [1, 0, -1]
    scores = np.where(raw > -2, raw / np.float32(0.5), -np.inf)
    sequences = np.concatenate([np.array(prompt), np.array(rows)], axis=1)
    return SimpleNamespace(**{"sequences": sequences, "scores": tuple(scores), "logits": tuple(raw), **fields})


ROWS, PROMPTS = [[1, 2, EOS, PAD], [3, 4, 1, 2]], [[PAD, 2], [3, 1]]
MASK = np.array([[0, 1], [1, 1]])


def test_prompts_and_responses_lose_their_padding() -> None:
    batch = from_transformers(output(ROWS, PROMPTS), CONFIG, STATED, attention_mask=MASK).require()
    assert batch.column("prompt_token_ids").to_pylist() == [[2], [3, 1]]
    assert batch.column("token_ids").to_pylist() == [[1, 2, EOS], [3, 4, 1, 2]]
    assert batch.column("finish_reason").to_pylist() == ["stop", "length"]
    assert batch.rollout_ids == ["0/0", "1/0"]
    told = {name: batch.column(name).to_pylist()[0] for name in ("temperature", "top_k", "top_p", "logit_bias")}
    assert told == {"temperature": 0.5, "top_k": 3, "top_p": 1.0, "logit_bias": []}


def test_sets_are_the_finite_scores_and_numbers_the_oracles() -> None:
    batch = from_transformers(output(ROWS, PROMPTS), CONFIG, STATED, attention_mask=MASK).require()
    assert batch.column("kept_ids").to_pylist()[0] == [[1, 2, 3], [2, 3, 4], [0, 1, 5]]
    oracle = reference.truncate([-3, 1, 0, -1, -3, -3], SamplingParams(temperature=0.5, top_k=3))
    numbers = {name: batch.column(name).to_pylist()[0][0] for name in ("behavior_logprobs", "log_kept_mass")}
    assert numbers == pytest.approx(
        {"behavior_logprobs": oracle.logprobs[0], "log_kept_mass": oracle.log_kept_mass}, abs=1e-6
    )
    assert batch.kept_entropy[0][0] == pytest.approx(oracle.entropy, abs=1e-6)
    assert batch.kept_logprob_var[0][0] == pytest.approx(oracle.logprob_var, abs=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"bad_words_ids": [[1]]},
        {"min_new_tokens": 2},
        {"sequence_bias": {(1,): 0.5}},
        {"repetition_penalty": 1.1},
        {"no_repeat_ngram_size": 2},
    ],
)
def test_the_kept_mass_is_unknown_under_settings_that_ban_or_change_logits(change: dict[str, Any]) -> None:
    assert from_transformers(output(ROWS, PROMPTS), {**CONFIG, **change}, STATED).require().log_kept_mass is None
    off = {name: type(value)() if isinstance(value, (list, dict)) else None for name, value in change.items()}
    assert from_transformers(output(ROWS, PROMPTS), {**CONFIG, **off}, STATED).require().log_kept_mass is not None


def test_nor_is_it_known_where_a_processor_shows_in_the_scores_of_any_token() -> None:
    call = output(ROWS, PROMPTS)
    call.scores[2][1] += 0.1
    assert from_transformers(call, CONFIG, STATED).require().column("log_kept_mass").null_count == 1


def test_without_raw_logits_the_kept_mass_is_unknown() -> None:
    assert from_transformers(output(ROWS, PROMPTS, logits=None), CONFIG, STATED).require().log_kept_mass is None


def test_greedy_search_keeps_the_token_alone_at_temperature_0() -> None:
    call = output(ROWS, PROMPTS)
    call.scores = call.logits
    batch = from_transformers(call, {**CONFIG, "do_sample": False}, STATED).require()
    assert batch.column("kept_ids").to_pylist()[1] == [[3], [4], [1], [2]]
    assert set(batch.behavior_logprobs.values.tolist()) == {0.0}
    assert batch.column("temperature").to_pylist() == [0.0, 0.0]
    assert batch.column("top_k").to_pylist() == [0, 0]
    call.sequences = call.sequences + np.array([[0, 0, 1, 0, 0, 0], [0] * 6])
    result = from_transformers(call, {**CONFIG, "do_sample": False}, STATED)
    assert {f.kind.value for f in result.rejected[0].findings} == {"member"}


def test_scores_that_are_finite_everywhere_are_full_support() -> None:
    call = output(ROWS, PROMPTS)
    call.scores = tuple(step / 0.5 for step in call.logits)
    batch = from_transformers(call, {**CONFIG, "top_k": 0}, STATED).require()
    assert batch.column("support").to_pylist() == ["full", "full"]
    assert batch.kept_ids is None
    assert batch.log_kept_mass.values.tolist() == [0.0] * 7


def test_scores_from_which_nothing_can_be_drawn_reject_their_row_alone() -> None:
    call = output(ROWS, PROMPTS)
    call.scores[1][0, 3] = np.nan
    result = from_transformers(call, CONFIG, STATED)
    assert result.rejected[0].error == (
        "scores[1] of row 0 hold NaN or +inf, or nothing finite; expected scores to draw from"
    )
    assert result.batch.rollout_ids == ["1/0"]
    call.scores[3][0, 3] = np.nan  # behind the end of row 0
    call.scores[1][0, 3] = -np.inf
    assert len(from_transformers(call, CONFIG, STATED).batch) == 2


def test_samples_of_one_prompt_are_numbered_under_the_callers_ids() -> None:
    batch = from_transformers(output(ROWS, PROMPTS), CONFIG, replace(STATED, id_prefix="s1/"), prompt_ids=["p", "p"])
    assert batch.require().rollout_ids == ["s1/p/0", "s1/p/1"]
    assert batch.batch.column("sample_index").to_pylist() == [0, 1]


def test_several_ends_and_tensors_of_them_are_known() -> None:
    for ends in ([4, EOS], np.array([4, EOS]), (4, EOS)):
        batch = from_transformers(output(ROWS, PROMPTS), {**CONFIG, "eos_token_id": ends}, STATED).require()
        assert batch.token_ids.lengths.tolist() == [3, 2]
    none = from_transformers(output(ROWS, PROMPTS), {**CONFIG, "eos_token_id": None}, STATED, eos_token_id=())
    assert none.require().token_ids.lengths.tolist() == [4, 4]


def test_stop_strings_need_the_lengths_of_the_responses() -> None:
    config = {**CONFIG, "stop_strings": ["x"]}
    with pytest.raises(InvalidInput, match="stop strings end a response anywhere; give response_lengths"):
        from_transformers(output(ROWS, PROMPTS), config, STATED)
    batch = from_transformers(output(ROWS, PROMPTS), config, STATED, response_lengths=[2, 4]).require()
    assert batch.token_ids.lengths.tolist() == [2, 4]
    assert batch.column("finish_reason").to_pylist() == ["unknown", "length"]


@pytest.mark.parametrize(
    ("change", "config", "options", "message"),
    [
        ({"scores": None}, {}, {}, "call generate with output_scores=True and return_dict_in_generate=True"),
        ({"beam_indices": np.zeros(1)}, {}, {}, "beam search draws no token from a distribution"),
        ({}, {"num_beams": 4}, {}, "beam search draws no token from a distribution"),
        ({}, {"do_sample": None}, {}, "does not say whether tokens were drawn; give do_sample=True or False"),
        (
            {},
            {"eos_token_id": None},
            {},
            r"does not say which ids end a response; give eos_token_id, \(\) if none does",
        ),
        ({"sequences": np.zeros(3)}, {}, {}, r"sequences must be a tensor of ids \[rows, length\]"),
        ({"scores": np.zeros(3)}, {}, {}, "scores must be one tensor per step, of the 6 ids or fewer"),
        ({}, {}, {"attention_mask": np.ones((2, 3))}, r"attention_mask is \(2, 3\); the prompts are \(2, 2\)"),
        ({}, {}, {"response_lengths": [5, 1]}, "response_lengths must be 2 numbers from 0 to 4"),
        ({}, {}, {"prompt_ids": ["p"]}, "1 prompt_ids for 2 outputs"),
    ],
)
def test_a_call_that_cannot_be_taken_is_refused_with_the_way_out(
    change: dict[str, Any], config: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        from_transformers(output(ROWS, PROMPTS, **change), {**CONFIG, **config}, STATED, **options)


def test_what_is_no_output_at_all_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no sequences with scores here"):
        from_transformers(np.zeros((2, 6), int), CONFIG)
    with pytest.raises(SchemaError, match="generation_config"):
        from_transformers(output(ROWS, PROMPTS), 5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings", [{"temperature": 0.7, "top_k": 20, "top_p": 0.9}, {"temperature": 1.3, "min_p": 0.3}]
)
def test_what_transformers_itself_samples_is_what_the_oracle_says(settings: dict[str, Any], repository: Any) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = repository / "tests" / "data" / "tiny_checkpoints" / "qwen2_bias"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(0)
    prompts, mask = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]]), torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    config = transformers.GenerationConfig(
        **{"top_k": 0, **settings},
        do_sample=True,
        eos_token_id=[3, 9, 40],
        pad_token_id=0,
        max_new_tokens=24,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    call = model.generate(prompts, attention_mask=mask, generation_config=config)
    stated = Stated(identity=Identity(vocab_size=160), others_off=True)
    batch = from_transformers(call, config, stated, attention_mask=mask).require()
    assert batch.column("prompt_token_ids").to_pylist() == [[5, 6, 7], [1, 2, 3, 4, 5]]
    params = SamplingParams(**settings)
    for row in range(2):
        for t, token in enumerate(batch.token_ids[row].tolist()):
            at = int(batch.token_ids.offsets[row]) + t
            oracle = reference.truncate(call.logits[t][row].double().numpy(), params)
            assert batch.kept_ids.inner[at].tolist() == oracle.kept_ids.tolist()
            expected = oracle.logprobs[oracle.kept_ids.tolist().index(token)]
            assert batch.behavior_logprobs.values[at] == pytest.approx(expected, abs=2e-6)
            assert batch.log_kept_mass.values[at] == pytest.approx(oracle.log_kept_mass, abs=2e-6)
