"""The real model of the demo, fetched into the user's cache as `keptset demo` does, against what transformers computed.

tests/data/smollm2_expected.safetensors comes from transformers 5.24 on the same dequantised weights, in float64: for
each position of one question and its answer, the 32 largest logits, the log-sum-exp and mean of all, and measures of
the last hidden state after the final norm. From these, the logits of transformers' own float32 pass differ by up to
9.3e-5 (mean 1.1e-5), its hidden states by up to 7.6e-5. (transformers also reads the GGUF file itself, to the same
weights bit for bit.)
"""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from keptset.rollout.tokenizer import Tokenizer
from keptset.scripts.demo_model import PROMPTS, ensure_demo_model

EXPECTED = Path(__file__).parents[1] / "data" / "smollm2_expected.safetensors"
# About three times the error of transformers' float32 pass.
TOLERANCE = 3e-4


@pytest.fixture(scope="module")
def smollm2():
    return ensure_demo_model()


@pytest.fixture(scope="module")
def expected():
    return safetensors.numpy.load_file(EXPECTED)


@pytest.fixture(scope="module")
def prompts():
    return [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


def test_there_are_64_prompts_with_ids_of_their_own(prompts):
    assert len(prompts) == 64
    assert len({prompt["prompt_id"] for prompt in prompts}) == 64
    for prompt in prompts:
        assert prompt.keys() == {"prompt_id", "messages"}
        assert prompt["messages"][-1]["role"] == "user"
        assert all(message.keys() == {"role", "content"} and message["content"] for message in prompt["messages"])


def test_prompts_are_short_enough_for_two_cores_and_not_all_of_one_length(smollm2, prompts):
    tokenizer = Tokenizer.from_folder(smollm2)
    lengths = np.array([len(tokenizer.encode_chat(prompt["messages"])) for prompt in prompts])
    assert lengths.mean() < 50
    assert lengths.max() < 150
    assert (lengths > 75).sum() >= 4


def test_the_real_tokenizer_gives_the_ids_that_transformers_gave(smollm2, expected):
    tokenizer = Tokenizer.from_folder(smollm2)
    prompt_ids = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    np.testing.assert_array_equal(prompt_ids, expected["token_ids"][: expected["prompt_length"][0]])
    answer_ids = expected["token_ids"][expected["prompt_length"][0] :]
    assert tokenizer.decode(answer_ids) == "The capital of France is Paris.<|im_end|>"
    assert answer_ids[-1] in tokenizer.stop_token_ids


def test_the_decoder_gives_the_logits_and_hidden_states_that_transformers_gave(smollm2, expected):
    paddle = pytest.importorskip("paddle", reason="needs the package paddlepaddle or paddlepaddle-gpu")
    from keptset.rollout.models import Segment, load_decoder

    token_ids = expected["token_ids"]
    decoder = load_decoder(smollm2)
    with paddle.no_grad():
        hidden = decoder.forward(token_ids, [Segment(slot=0, start=0, length=len(token_ids))])
        logits_TV = decoder.logits(hidden).numpy().astype(np.float64)
    hidden_TH = hidden.numpy().astype(np.float64)

    assert logits_TV.shape == (len(token_ids), Tokenizer.from_folder(smollm2).vocab_size)
    highest = logits_TV.max(axis=1)
    measured = {
        "top_logits": np.take_along_axis(logits_TV, expected["top_ids"].astype(np.int64), axis=1),
        "logsumexp": highest + np.log(np.exp(logits_TV - highest[:, None]).sum(axis=1)),
        "logit_mean": logits_TV.mean(axis=1),
        "hidden_first": hidden_TH[:, :16],
        "hidden_mean": hidden_TH.mean(axis=1),
        "hidden_norm": np.linalg.norm(hidden_TH, axis=1),
    }
    for name, values in measured.items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=TOLERANCE, err_msg=name)
    # The answer was chosen greedily: each of its tokens is the largest logit at the position before it.
    answer = np.arange(expected["prompt_length"][0], len(token_ids))
    np.testing.assert_array_equal(logits_TV[answer - 1].argmax(axis=1), token_ids[answer])
