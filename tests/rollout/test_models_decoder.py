"""The decoder against logits and hidden states that another implementation computed, on every path through it.

Dims: B sequences, T tokens, V vocabulary, H hidden.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

paddle = pytest.importorskip("paddle")

from keptset.rollout.models import Decoder, KVCache, Segment, load_decoder, segments  # noqa: E402
from keptset.schemas.errors import CheckpointError, InvalidInput  # noqa: E402

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny_checkpoints"
NAMES = ("llama_tied", "llama_untied_llama3rope", "qwen2_bias", "qwen3_qknorm")
TOLERANCE = 2e-5


@dataclass(frozen=True, kw_only=True)
class Truth:
    """A tiny model and what transformers computes with it in float32."""

    decoder: Decoder
    ids_BT: np.ndarray
    logits_BTV: np.ndarray
    hidden_BTH: np.ndarray

    def check(self, hidden: paddle.Tensor, rows: Sequence[tuple[int, int]]) -> None:
        """Compare flat hidden states, and their logits, at (sequence, position)."""
        sequences, positions = np.array(rows).T
        assert hidden.shape == [len(rows), self.hidden_BTH.shape[-1]]
        np.testing.assert_allclose(hidden.numpy(), self.hidden_BTH[sequences, positions], rtol=0, atol=TOLERANCE)
        logits = self.decoder.logits(hidden)
        assert logits.dtype == paddle.float32
        np.testing.assert_allclose(logits.numpy(), self.logits_BTV[sequences, positions], rtol=0, atol=TOLERANCE)

    def step(self, cache: KVCache, parts: Sequence[tuple[int, int, int, int]]) -> None:
        """Run and check (slot, sequence, start, length) parts in one call."""
        ids = np.concatenate([self.ids_BT[b, start : start + length] for _, b, start, length in parts])
        runs = [Segment(slot=slot, start=start, length=length) for slot, _, start, length in parts]
        rows = [(b, start + i) for _, b, start, length in parts for i in range(length)]
        self.check(self.decoder.forward(ids, runs, cache), rows)


def load_truth(name: str, folder: Path | None = None) -> Truth:
    expected = load_file(TINY / name / "expected.safetensors")
    return Truth(
        decoder=load_decoder(folder or TINY / name),
        ids_BT=expected["input_ids"],
        logits_BTV=expected["logits"],
        hidden_BTH=expected["last_hidden_state"],
    )


@pytest.fixture(scope="module", params=NAMES)
def truth(request: pytest.FixtureRequest) -> Truth:
    return load_truth(request.param)


@pytest.fixture(scope="module")
def llama() -> Truth:
    return load_truth("llama_tied")


@pytest.fixture
def few_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups so small that segments, and the queries of one segment, are attended in several products."""
    monkeypatch.setattr(segments, "_MOST_SCORES", 6 * 40 * 7)


def test_one_pass_over_whole_sequences(truth: Truth) -> None:
    B, T = truth.ids_BT.shape
    runs = [Segment(slot=0, start=0, length=T)] * B
    hidden = truth.decoder.forward(truth.ids_BT.reshape(-1), runs)
    truth.check(hidden, [(b, t) for b in range(B) for t in range(T)])


def test_token_by_token_through_the_cache(truth: Truth) -> None:
    B, T = truth.ids_BT.shape
    cache = truth.decoder.new_cache(B, T)
    for t in range(T):
        truth.step(cache, [(b, b, t, 1) for b in range(B)])
    assert cache.lengths_S.tolist() == [T] * B


def test_packed_sequences_of_many_lengths_do_not_see_each_other(truth: Truth) -> None:
    lengths = [1, 40, 2, 9, 1, 33, 8, 5, 12, 40, 3]
    ids = np.concatenate([truth.ids_BT[i % 3, :length] for i, length in enumerate(lengths)])
    hidden = truth.decoder.forward(ids, [Segment(slot=0, start=0, length=length) for length in lengths])
    truth.check(hidden, [(i % 3, t) for i, length in enumerate(lengths) for t in range(length)])


def test_chunks_and_single_steps_of_several_slots_in_one_call(truth: Truth) -> None:
    cache = truth.decoder.new_cache(5, 64)
    truth.step(cache, [(4, 0, 0, 11), (1, 1, 0, 3)])
    truth.step(cache, [(1, 1, 3, 1), (4, 0, 11, 1), (0, 2, 0, 7)])
    truth.step(cache, [(4, 0, 12, 9), (0, 2, 7, 1), (1, 1, 4, 2)])
    truth.step(cache, [(0, 2, 8, 1), (1, 1, 6, 1), (4, 0, 21, 1)])
    truth.step(cache, [(1, 1, 7, 30), (0, 2, 9, 31), (4, 0, 22, 18)])
    assert cache.lengths_S.tolist() == [40, 37, 0, 0, 40]


@pytest.mark.usefixtures("few_scores")
def test_small_groups_give_the_same_in_one_pass(truth: Truth) -> None:
    lengths = [40, 12, 40, 13, 14, 1]
    ids = np.concatenate([truth.ids_BT[i % 3, :length] for i, length in enumerate(lengths)])
    hidden = truth.decoder.forward(ids, [Segment(slot=0, start=0, length=length) for length in lengths])
    truth.check(hidden, [(i % 3, t) for i, length in enumerate(lengths) for t in range(length)])


@pytest.mark.usefixtures("few_scores")
def test_small_groups_give_the_same_through_the_cache(truth: Truth) -> None:
    cache = truth.decoder.new_cache(9, 64)
    truth.step(cache, [(slot, slot % 3, 0, 12 + slot) for slot in range(9)])
    truth.step(cache, [(slot, slot % 3, 12 + slot, 1) for slot in reversed(range(9))])
    truth.step(cache, [(2, 2, 15, 20), (7, 1, 20, 20), (5, 2, 18, 1)])


@pytest.mark.parametrize("slots", [(0, 1, 2), (2, 0, 1), (3, 5, 4), (0, 2, 3), (0, 30, 7)])
def test_any_choice_and_order_of_slots_gives_the_same(llama: Truth, slots: tuple[int, ...]) -> None:
    cache = llama.decoder.new_cache(32, 64)
    llama.step(cache, [(slot, b, 0, 20) for b, slot in enumerate(slots)])
    for t in range(20, 24):
        llama.step(cache, [(slot, b, t, 1) for b, slot in enumerate(slots)])


def test_short_sequences_beside_a_storage_that_grew_long(llama: Truth) -> None:
    cache = llama.decoder.new_cache(4, 256)
    llama.step(cache, [(0, 0, 0, 17), (3, 1, 0, 5)])
    long = np.tile(llama.ids_BT[0], 6)
    llama.decoder.forward(long, [Segment(slot=2, start=0, length=len(long))], cache)
    assert cache.allocated >= 240
    llama.step(cache, [(0, 0, 17, 1), (3, 1, 5, 1)])
    llama.step(cache, [(0, 0, 18, 6), (3, 1, 6, 4)])
    llama.step(cache, [(2, 2, 0, 9)])
    llama.step(cache, [(0, 0, 24, 1), (2, 2, 9, 1), (3, 1, 10, 1)])


def test_a_slot_is_used_again_from_the_start(llama: Truth) -> None:
    cache = llama.decoder.new_cache(1, 64)
    llama.step(cache, [(0, 0, 0, 40)])
    llama.step(cache, [(0, 1, 0, 6)])
    assert cache.lengths_S.tolist() == [6]
    llama.step(cache, [(0, 1, 6, 1)])


def test_a_sequence_goes_back_and_takes_another_way(llama: Truth) -> None:
    cache = llama.decoder.new_cache(1, 64)
    llama.step(cache, [(0, 0, 0, 10)])
    wrong = [(int(llama.ids_BT[0, 10]) + 1) % 160, 5, 6]
    llama.decoder.forward(wrong, [Segment(slot=0, start=10, length=3)], cache)
    llama.step(cache, [(0, 0, 10, 2)])
    llama.step(cache, [(0, 0, 12, 1)])


def test_the_last_position_is_used_and_none_beyond(llama: Truth) -> None:
    context = llama.decoder.config.max_position_embeddings
    ids = np.resize(llama.ids_BT[0], context)
    cache = llama.decoder.new_cache(1, context)
    whole = llama.decoder.forward(ids, [Segment(slot=0, start=0, length=context)])
    llama.decoder.forward(ids[:-1], [Segment(slot=0, start=0, length=context - 1)], cache)
    last = llama.decoder.forward(ids[-1:], [Segment(slot=0, start=context - 1, length=1)], cache)
    np.testing.assert_allclose(last.numpy()[0], whole.numpy()[-1], rtol=0, atol=TOLERANCE)
    with pytest.raises(InvalidInput, match="256 positions"):
        llama.decoder.forward([1], [Segment(slot=0, start=context, length=1)], llama.decoder.new_cache(1, 300))


@pytest.mark.parametrize(
    ("ids", "runs", "says"),
    [
        ([160], [(0, 0, 1)], "token id 160 at 0 lies outside the vocabulary"),
        ([3, -1], [(0, 0, 2)], "token id -1 at 1"),
        ([0.5], [(0, 0, 1)], "float64"),
        ([[1, 2]], [(0, 0, 2)], "one row"),
        ([], [], "no token ids"),
        ([1], [], "no segments"),
        ([1, 2], [(0, 0, 1)], "1 tokens, and 2 token ids"),
        ([1], [(0, 0, 1), (1, 0, 0)], "segment 1 is"),
        ([1], [(0, -1, 1)], "segment 0 is"),
        ([1], [(2, 0, 1)], "slot 2 does not exist; the cache has 2"),
        ([1], [(-1, 0, 1)], "slot -1"),
        ([1, 1], [(1, 0, 1), (1, 1, 1)], "named twice"),
        ([1], [(1, 5, 1)], "starts at position 5 of slot 1, which holds 0"),
        (list(range(33)), [(0, 0, 33)], "33 tokens does not fit a cache of capacity 32"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused(
    llama: Truth, ids: list, runs: list[tuple[int, int, int]], says: str
) -> None:
    cache = llama.decoder.new_cache(2, 32)
    made = [Segment(slot=slot, start=start, length=length) for slot, start, length in runs]
    with pytest.raises(InvalidInput, match=says):
        llama.decoder.forward(ids, made, cache)
    assert cache.lengths_S.tolist() == [0, 0]


def test_a_start_without_a_cache_is_refused(llama: Truth) -> None:
    with pytest.raises(InvalidInput, match="without a cache segments are whole sequences"):
        llama.decoder.forward([1], [Segment(slot=0, start=1, length=1)])


def test_a_cache_of_another_model_is_refused(llama: Truth) -> None:
    with pytest.raises(InvalidInput, match="another shape"):
        llama.decoder.forward([1], [Segment(slot=0, start=0, length=1)], KVCache(2, 1, 8, 2, 16))


@pytest.mark.parametrize(("slots", "capacity"), [(0, 8), (1, 0)])
def test_a_cache_without_room_is_refused(llama: Truth, slots: int, capacity: int) -> None:
    with pytest.raises(InvalidInput, match="must be >= 1"):
        llama.decoder.new_cache(slots, capacity)


def test_a_cache_takes_memory_as_its_sequences_grow(llama: Truth) -> None:
    cache = llama.decoder.new_cache(3, 200)
    per_position = 2 * 2 * 3 * 2 * 8 * 4  # keys and values, layers, slots, heads, head size, bytes
    assert cache.nbytes == 64 * per_position
    cache.reserve(65)
    assert cache.nbytes == 128 * per_position
    cache.reserve(200)
    assert cache.nbytes == 256 * per_position


@pytest.mark.parametrize("dtype", ["float64", "int8", ""])
def test_an_unknown_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(InvalidInput, match="supported are float32, bfloat16, float16"):
        load_decoder(TINY / "llama_tied", dtype=dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_run_or_say_that_the_device_cannot(dtype: str, llama: Truth) -> None:
    if not _multiplies(dtype):
        with pytest.raises(InvalidInput, match=f"no {dtype} matrix product; use float32"):
            load_decoder(TINY / "llama_tied", dtype=dtype)
        return
    decoder = load_decoder(TINY / "llama_tied", dtype=dtype)
    logits = decoder.logits(decoder.forward(llama.ids_BT[0], [Segment(slot=0, start=0, length=40)]))
    assert logits.dtype == paddle.float32
    assert np.abs(logits.numpy() - llama.logits_BTV[0]).mean() < 0.05


def _multiplies(dtype: str) -> bool:
    try:
        return paddle.matmul(paddle.ones([2, 2], dtype), paddle.ones([2, 2], dtype)).dtype is not None
    except RuntimeError:
        return False


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_sixteen_bit_checkpoints_give_what_their_rounded_weights_give(
    tmp_path: Path, stored: str, sharded: bool
) -> None:
    weights = load_file(TINY / "qwen2_bias" / "model.safetensors")
    rounded = {name: _rounded(values, stored) for name, values in weights.items()}
    for folder, files in ((tmp_path / "wide", rounded), (tmp_path / "narrow", None)):
        folder.mkdir()
        shutil.copy(TINY / "qwen2_bias" / "config.json", folder)
        if files:
            save_file(files, folder / "model.safetensors")
    _save_narrow(tmp_path / "narrow", rounded, stored, shards=2 if sharded else 1)
    ids, runs = np.arange(30), [Segment(slot=0, start=0, length=30)]
    wide, narrow = (load_decoder(tmp_path / folder) for folder in ("wide", "narrow"))
    np.testing.assert_array_equal(narrow.forward(ids, runs).numpy(), wide.forward(ids, runs).numpy())


def _rounded(values: np.ndarray, stored: str) -> np.ndarray:
    if stored == "float16":
        return values.astype(np.float16).astype(np.float32)
    return (values.view(np.uint32) >> 16 << 16).view(np.float32)


def _save_narrow(folder: Path, weights: dict[str, np.ndarray], stored: str, shards: int) -> None:
    """Write bytes and header here: numpy knows no bfloat16."""
    weight_map = {}
    for i in range(shards):
        name, header, data = f"part-{i}.safetensors" if shards > 1 else "model.safetensors", {}, b""
        for tensor in sorted(weights)[i::shards]:
            wide = weights[tensor]
            raw = wide.astype("<f2") if stored == "float16" else (wide.view(np.uint32) >> 16).astype("<u2")
            dtype = "F16" if stored == "float16" else "BF16"
            span = [len(data), len(data) + raw.nbytes]
            header[tensor] = {"dtype": dtype, "shape": list(wide.shape), "data_offsets": span}
            data += raw.tobytes()
            weight_map[tensor] = name
        text = json.dumps(header).encode()
        (folder / name).write_bytes(len(text).to_bytes(8, "little") + text + data)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_checkpoint_that_config_and_weights_disagree_on_is_refused(tmp_path: Path) -> None:
    shutil.copy(TINY / "llama_tied" / "model.safetensors", tmp_path)
    config = json.loads((TINY / "llama_tied" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    with pytest.raises(CheckpointError, match=r"gate_proj.*\[96, 48\]; config.json asks for \[80, 48\]"):
        load_decoder(tmp_path)


def test_weights_are_the_checkpoints_and_a_copy(truth: Truth, request: pytest.FixtureRequest) -> None:
    stored = load_file(TINY / request.node.callspec.params["truth"] / "model.safetensors")
    weights = truth.decoder.weights()
    assert set(weights) == set(stored)
    assert all(values.is_contiguous() for values in weights.values())
    for name, values in stored.items():
        np.testing.assert_array_equal(weights[name].numpy(), values)
    weights["model.norm.weight"].fill_(7.0)
    weights["model.layers.0.mlp.up_proj.weight"].fill_(7.0)
    again = truth.decoder.weights()
    np.testing.assert_array_equal(again["model.norm.weight"].numpy(), stored["model.norm.weight"])
    name = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(again[name].numpy(), stored[name])


@pytest.mark.parametrize("as_arrays", [False, True])
def test_loaded_weights_take_the_old_ones_place(as_arrays: bool) -> None:
    truth = load_truth("llama_untied_llama3rope")
    good = truth.decoder.weights()
    kept = truth.decoder.parameters()
    before = [id(parameter) for parameter in kept]
    hidden = truth.decoder.forward([1], [Segment(slot=0, start=0, length=1)])
    logits = truth.decoder.logits(hidden).numpy()
    truth.decoder.load_weights({name: values * 2 for name, values in good.items()})
    np.testing.assert_array_equal(truth.decoder.logits(hidden).numpy(), logits * 2)
    truth.decoder.load_weights({name: values * 0 for name, values in good.items()})
    assert all(not parameter.numpy().any() for parameter in kept)
    truth.decoder.load_weights({name: values.numpy() if as_arrays else values for name, values in good.items()})
    assert [id(parameter) for parameter in truth.decoder.parameters()] == before
    truth.step(truth.decoder.new_cache(1, 64), [(0, 0, 0, 40)])


def test_weights_that_do_not_fit_change_nothing(llama: Truth) -> None:
    good = llama.decoder.weights()
    zeros = {name: values * 0 for name, values in good.items()}
    name = "model.layers.1.self_attn.k_proj.weight"
    for bad, says in (
        ({k: v for k, v in zeros.items() if k != name}, "k_proj.weight' is missing"),
        (zeros | {"lm_head.weight": zeros["model.embed_tokens.weight"]}, "'lm_head.weight' is unknown"),
        (zeros | {name: zeros[name].t()}, r"k_proj.weight' has shape \[48, 16\]; expected is \[16, 48\]"),
    ):
        with pytest.raises(InvalidInput, match=says):
            llama.decoder.load_weights(bad)
    for kept, values in llama.decoder.weights().items():
        np.testing.assert_array_equal(values.numpy(), good[kept].numpy())


def test_a_tied_head_is_the_embedding_and_an_untied_one_is_not(truth: Truth) -> None:
    decoder = truth.decoder
    assert decoder.head_weight.shape == [160, 48]
    same = any(parameter is decoder.head_weight for parameter in decoder.parameters()[:1])
    assert same == decoder.config.tie_word_embeddings
    count = sum(int(parameter.size) for parameter in decoder.parameters())
    assert count == sum(int(values.size) for values in decoder.weights().values())


@pytest.mark.parametrize("name", NAMES)
def test_gradients_agree_with_finite_differences(name: str) -> None:
    decoder = load_decoder(TINY / name, trainable=True)
    lengths = (7, 12, 1, 9)
    rng = np.random.default_rng(5)
    ids = rng.integers(0, 160, sum(lengths))
    runs = [Segment(slot=0, start=0, length=length) for length in lengths]
    direction_TV = paddle.to_tensor(rng.standard_normal((len(ids), 160)).astype(np.float32) / 100)

    def loss() -> paddle.Tensor:
        return (decoder.logits(decoder.forward(ids, runs)) * direction_TV).sum()

    loss().backward()
    step = 1e-2
    for i, parameter in enumerate(decoder.parameters()):
        gradient = parameter.grad.numpy().astype(np.float64)
        towards = gradient / np.linalg.norm(gradient) + rng.standard_normal(gradient.shape) / np.sqrt(gradient.size)
        start = parameter.numpy()
        ends = []
        for sign in (1, -1):
            with paddle.no_grad():
                parameter.set_value((start + sign * step * towards).astype(np.float32))
                ends.append(float(loss()))
        parameter.set_value(start)
        slope = (ends[0] - ends[1]) / (2 * step)
        assert slope == pytest.approx((gradient * towards).sum(), rel=5e-3, abs=2e-4), f"parameter {i}"


def test_no_gradient_is_kept_through_the_cache_nor_unasked() -> None:
    runs = [Segment(slot=0, start=0, length=3)]
    trainable = load_decoder(TINY / "llama_tied", trainable=True)
    assert trainable.forward([1, 2, 3], runs, trainable.new_cache(1, 8)).stop_gradient
    assert not trainable.forward([1, 2, 3], runs).stop_gradient
    assert load_decoder(TINY / "llama_tied").forward([1, 2, 3], runs).stop_gradient


def test_a_decoder_learns_through_a_stock_optimizer() -> None:
    decoder = load_decoder(TINY / "qwen3_qknorm", trainable=True)
    optimizer = paddle.optimizer.AdamW(learning_rate=1e-2, parameters=decoder.parameters())
    ids, runs = np.arange(20), [Segment(slot=0, start=0, length=20)]
    targets = paddle.to_tensor(np.arange(1, 21))
    losses = []
    for _ in range(6):
        loss = paddle.nn.functional.cross_entropy(decoder.logits(decoder.forward(ids, runs)), targets)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 1
