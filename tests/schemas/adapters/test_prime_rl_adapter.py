"""prime-rl: packed micro-batches by position, live and as msgpack, and the traps in each."""

import copy
import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keptset.schemas.adapters import Stated, adapt_files, adapter_for, from_prime_rl
from keptset.schemas.columns import Identity
from keptset.schemas.errors import SchemaError

msgpack = pytest.importorskip("msgpack", reason="prime-rl files are msgpack; install the extra [prime-rl]")
STATED = Stated(identity=Identity(vocab_size=24))
MASK = 16


@pytest.fixture
def fields(engines: Path) -> list[Any]:
    """The fields of a micro-batch with two packed sequences, [1, 8, 13, 5 | 7, 12, 9, 2] and one of 9 tokens."""
    (micro_batch,) = msgpack.unpackb((engines / "prime_rl_good.msgpack").read_bytes())
    return list(micro_batch)


def counts_of(fields: list[Any]) -> np.ndarray:
    return np.frombuffer(fields[MASK][1], "<i4").copy()


def with_mask(fields: list[Any], ids: Any, counts: Any, logprobs: Any = None) -> list[Any]:
    packed = [np.array(ids, "<i4").tobytes(), np.array(counts, "<i4").tobytes(), logprobs]
    return [*fields[:MASK], packed, *fields[MASK + 1 :]]


def test_packed_sequences_are_told_apart_by_their_lengths(fields: list[Any]) -> None:
    batch = from_prime_rl([fields], None, STATED).require()
    assert batch.rollout_ids == ["trace-a/0", "trace-b/0"]
    assert batch.column("prompt_token_ids").to_pylist() == [[1, 8, 13, 5]] * 2
    assert batch.column("token_ids").to_pylist() == [[7, 12, 9, 2], [7, 15, 4, 4, 20]]
    assert batch.column("temperature").to_pylist() == [0.5, 0.5]
    assert batch.column("finish_reason").to_pylist() == ["unknown"] * 2
    for name in ("top_p", "top_k", "min_p", "policy_versions", "logit_bias"):
        assert batch.column(name).null_count == 2


@pytest.mark.parametrize("length", [16, 17, 19])
def test_each_known_length_is_read(fields: list[Any], length: int) -> None:
    batch = from_prime_rl([fields[:length]], None, STATED).require()
    assert batch.column("support").to_pylist() == ["absent" if length == 16 else "kept"] * 2
    assert batch.column("logprob_domain").to_pylist() == ["unknown" if length == 16 else "kept"] * 2
    assert batch.column("token_ids").to_pylist() == [[7, 12, 9, 2], [7, 15, 4, 4, 20]]
    assert len(set(batch.rollout_ids)) == 2


@pytest.mark.parametrize("length", [0, 3, 15, 18, 20])
def test_another_length_is_refused(fields: list[Any], length: int) -> None:
    with pytest.raises(SchemaError, match=f"a list of {length}; expected a micro-batch: an array of 16, 17 or 19"):
        from_prime_rl([[*fields, None][:length]])


def test_padding_behind_the_last_sequence_is_left_out(fields: list[Any]) -> None:
    whole = from_prime_rl([fields], None, STATED).require()
    padded = copy.deepcopy(fields)
    for number, filler in ((0, 0), (1, False), (2, 0.0), (3, 0.0), (4, 0), (6, 1.0)):
        padded[number] += [filler] * 3
    padded = with_mask(padded, np.frombuffer(fields[MASK][0], "<i4"), [*counts_of(fields), 0, 0, 0])
    assert from_prime_rl([padded], None, STATED).require().arrow.equals(whole.arrow)


@pytest.mark.parametrize("lengths", [[], [8], [8, 8]])
@pytest.mark.parametrize(
    ("number", "told"), [(1, "a loss"), (3, "a log-probability"), (MASK, "a count of kept ids"), (None, "a loss")]
)
def test_padding_that_was_drawn_is_a_sequence_that_the_lengths_leave_out(
    fields: list[Any], lengths: list[int], number: int | None, told: str
) -> None:
    fields[5], fields[17], fields[18] = lengths, fields[17][: len(lengths)], fields[18][: len(lengths)]
    behind = sum(lengths)
    ids, counts = np.frombuffer(fields[MASK][0], "<i4"), counts_of(fields)
    for other, filler in ((1, False), (3, 0.0)):
        if number not in (other, None):
            fields[other][behind:] = [filler] * (17 - behind)
    if number not in (MASK, None):
        counts[behind:] = 0
        fields = with_mask(fields, ids[: counts.sum()], counts)
    with pytest.raises(SchemaError, match=rf"they add up to {behind}, and token \d+ has {told}, which padding has not"):
        from_prime_rl([fields], None, STATED)


def test_tokens_between_turns_were_not_drawn(fields: list[Any]) -> None:
    counts = counts_of(fields)
    ids = np.frombuffer(fields[MASK][0], "<i4")
    at = 5  # the second response token of the first sequence
    begin = int(counts[:at].sum())
    fields[1][at], fields[3][at] = False, 0.0
    ids, counts[at] = np.delete(ids, range(begin, begin + counts[at])), 0
    batch = from_prime_rl([with_mask(fields, ids, counts)], None, STATED).require()
    assert batch.column("sampled").to_pylist()[0] == [True, False, True, True]
    assert batch.column("kept_ids").to_pylist()[0][1] is None


def test_a_drawn_token_that_is_not_trained_on_keeps_its_set(fields: list[Any]) -> None:
    fields[1][4] = False
    batch = from_prime_rl([fields], None, STATED).require()
    assert batch.column("trainable").to_pylist()[0] == [False, True, True, True]
    assert batch.column("sampled").to_pylist()[0] == [True] * 4
    fields[1][6] = False  # the token of a set of one, with log-probability 0
    assert from_prime_rl([fields], None, STATED).require().column("sampled").to_pylist()[0] == [True] * 4


def test_a_count_of_0_is_a_set_that_was_not_recorded(fields: list[Any]) -> None:
    counts, ids = counts_of(fields), np.frombuffer(fields[MASK][0], "<i4")
    first = int(counts[:8].sum())
    none = from_prime_rl([with_mask(fields, ids[first:], [0] * 8 + counts[8:].tolist())], None, STATED).require()
    assert none.column("support").to_pylist() == ["absent", "kept"]
    some = from_prime_rl([with_mask(fields, ids[3:], [0] * 5 + counts[5:].tolist())], None, STATED)
    assert [f.kind.value for f in some.rejected[0].findings] == ["empty_set"]
    assert some.batch.rollout_ids == ["trace-b/0"]


def test_the_kept_distribution_is_taken_where_it_is_packed_along(fields: list[Any]) -> None:
    counts, ids = counts_of(fields), np.frombuffer(fields[MASK][0], "<i4")
    logprobs = np.concatenate([np.full(n, -np.log(n)) for n in counts if n]).astype("<f4")
    fields[3] = [-float(np.log(n)) if n else 0.0 for n in counts]
    batch = from_prime_rl([with_mask(fields, ids, counts, logprobs.tobytes())], None, STATED).require()
    assert batch.kept_logprobs.inner[0].tolist() == pytest.approx([-np.log(3)] * 3)


def test_temperatures_that_differ_within_a_response_are_unknown(fields: list[Any]) -> None:
    fields[6][5] = 0.7
    assert from_prime_rl([fields], None, STATED).require().column("temperature").to_pylist() == [None, 0.5]
    fields[6] = None
    stated = Stated(identity=Identity(vocab_size=24), settings={"temperature": 0.9})
    assert from_prime_rl([fields], None, stated).require().column("temperature").to_pylist() == [0.9, 0.9]


@pytest.mark.parametrize(
    ("number", "value", "message"),
    [
        (0, "x", r"\[0\] is 'x'; expected a list"),
        (1, [True], r"\[1\] is a list of 1; expected one entry for each of the 17 tokens"),
        (1, [2.5] * 17, r"\[1\]\[0\] is 2.5; expected a whole number"),
        (3, [0.0] * 16, r"\[3\] is a list of 16; expected one entry for each of the 17 tokens"),
        (5, [8, 10], r"\[5\] is a list of 2; expected lengths that fit into the 17 tokens"),
        (5, [-1, 3], r"\[5\] is a list of 2; expected lengths that fit into the 17 tokens"),
        (5, None, r"\[5\] is null; expected a list"),
        (16, 7, r"\[16\] is 7; expected \[ids, counts\] or \[ids, counts, logprobs\]"),
        (16, [b"abc", b""], r"\[16\]\[0\] is b'abc'; expected bytes of 4 each, not 3"),
        (16, [b"\1\0\0\0", b"\2\0\0\0"], r"expected counts that add up to the 1 ids; they add up to 2"),
        (16, [b"\1\0\0\0", b"\1\0\0\0"], r"\[16\] is a list of 2; expected one count for each of the 17 tokens, not 1"),
        (17, ["a"], r"\[17\] is a list of 1; expected one for each of the 2 sequences"),
        (18, ["a", 0], r"\[18\]\[0\] is 'a'; expected a whole number"),
    ],
)
def test_fields_of_another_layout_are_refused_by_number(
    fields: list[Any], number: int, value: Any, message: str
) -> None:
    fields[number] = value
    with pytest.raises(SchemaError, match=message):
        from_prime_rl([fields])


def test_logprobs_beside_the_mask_must_be_as_many_as_its_ids(fields: list[Any]) -> None:
    ids, counts = np.frombuffer(fields[MASK][0], "<i4"), counts_of(fields)
    with pytest.raises(SchemaError, match=r"expected one number for each of the 27 ids, not 1"):
        from_prime_rl([with_mask(fields, ids, counts, b"\0\0\0\0")])


@pytest.mark.parametrize("odd", [dict.fromkeys(range(17), 1), set(range(17)), np.array(5), None])
def test_a_rejected_sequence_keeps_fields_that_cannot_be_cut(fields: list[Any], odd: object) -> None:
    fields[3][4] = 5.0  # a log-probability above 0
    fields[9] = odd
    (rejected,) = from_prime_rl([fields], None, STATED).rejected
    assert [len(rejected.record[number]) for number in (0, 3)] == [8, 8]
    assert rejected.record[9] is odd


def test_a_rejected_sequence_is_a_micro_batch_of_its_own(fields: list[Any]) -> None:
    ids, counts = np.frombuffer(fields[MASK][0], "<i4").copy(), counts_of(fields)
    ids[int(counts[:12].sum())] = 6  # of the second sequence's first set {3, 7, 11}
    ids[int(counts[:12].sum()) + 1] = 8
    result = from_prime_rl([with_mask(fields, ids, counts)], None, STATED)
    (rejected,) = result.rejected
    assert [f.kind.value for f in rejected.findings] == ["member"]
    again = from_prime_rl([rejected.record], None, STATED)
    assert again.rejected[0].findings == rejected.findings
    assert again.rejected[0].rollout_id == "trace-b/0"
    kept = json.loads(rejected.to_json())["record"]
    assert kept[2] == [0.0] * 4 + [0.5] * 5
    assert kept[5] == [9]


def test_live_structs_are_read_by_the_order_of_their_fields(fields: list[Any]) -> None:
    names = [f"field_{number}" for number in range(19)]
    mask = types.SimpleNamespace(ids=fields[MASK][0], counts=fields[MASK][1], __struct_fields__=("ids", "counts"))
    struct = types.SimpleNamespace(**dict(zip(names, fields, strict=True)), __struct_fields__=tuple(names))
    struct.field_16 = mask
    struct.field_1 = np.array(fields[1])
    whole = from_prime_rl([fields], None, STATED).require()
    assert from_prime_rl([struct], None, STATED).require().arrow.equals(whole.arrow)


def test_files_are_read_micro_batch_by_micro_batch(fields: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "step_1" / "rank_0.bin"
    path.parent.mkdir()
    second = copy.deepcopy(fields)
    second[17] = ["trace-c", "trace-d"]
    path.write_bytes(msgpack.packb([fields, second, 5]))
    (result,) = adapt_files(adapter_for("prime-rl"), [path], STATED)
    assert result.batch.rollout_ids == ["trace-a/0", "trace-b/0", "trace-c/0", "trace-d/0"]
    (rejected,) = result.rejected
    assert rejected.place == f"{path} micro-batch 2"
    assert str(rejected.error).startswith("the record is 5; expected a micro-batch")
