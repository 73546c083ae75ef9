import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keptset.rollout import filters
from keptset.rollout.filters import keep, keep_top_k, keep_top_p, top_superset
from keptset.schemas.sampling_params import SamplingParams


@st.composite
def candidates(draw):
    """Logits and weights, from all equal to far apart, some of them -inf."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    z = rng.standard_normal(draw(st.integers(1, 9000))) * draw(st.sampled_from([0, 1e-9, 1e-3, 1, 30, 1000]))
    if draw(st.booleans()):
        z = np.round(z, draw(st.integers(0, 3)))
    if draw(st.booleans()):
        z[1:][rng.random(len(z) - 1) < 0.5] = -np.inf
    return z, np.exp(z - z.max())


def by_definition(z):
    return np.lexsort((np.arange(len(z)), -z))


@settings(deadline=None, max_examples=100)
@given(candidates(), st.floats(1e-6, 0.999999))
def test_top_p_keeps_a_beginning_of_the_order_with_just_the_mass_asked_for(case, share):
    z, w = case
    bound = share * w.sum()
    kept = keep_top_p(z, w, bound)
    order = by_definition(z)
    assert kept.tolist() == sorted(order[: len(kept)].tolist())
    assert w[order[: len(kept) - 1]].sum() <= bound * (1 + 1e-9)
    assert w[kept].sum() >= bound * (1 - 1e-9)
    assert np.isfinite(z[kept]).all()


@settings(deadline=None, max_examples=100)
@given(candidates(), st.data())
def test_top_k_keeps_exactly_the_k_first(case, data):
    z, _ = case
    k = data.draw(st.integers(1, max(1, len(z) - 1)))
    if k < len(z):
        assert keep_top_k(z, k).tolist() == sorted(by_definition(z)[:k].tolist())


@settings(deadline=None, max_examples=100)
@given(candidates(), st.integers(1, 600), st.floats(1e-6, 0.999999))
def test_top_k_with_top_p_is_one_after_the_other(case, k, share):
    z, w = case
    kept = keep(z, w, float(w.sum()), SamplingParams(top_k=k, top_p=share))
    first = by_definition(z)[:k]
    first = first[np.isfinite(z[first])]
    assert kept.tolist() == sorted(first[: len(kept)].tolist())
    assert w[first[: len(kept) - 1]].sum() <= share * w[first].sum() * (1 + 1e-9)
    assert w[kept].sum() >= share * w[first].sum() * (1 - 1e-9)


@settings(deadline=None, max_examples=100)
@given(candidates(), st.integers(1, 600))
def test_the_superset_holds_the_k_largest(case, k):
    z, _ = case
    near = top_superset(z, k)
    assert near is None or set(by_definition(z)[:k].tolist()) <= set(near.tolist())


def test_the_superset_of_a_typical_row_is_small():
    z = np.random.default_rng(0).standard_normal(151_936)
    assert len(top_superset(z, 512)) < 700


@pytest.mark.parametrize("sort_at_most", [1, 2, 50])
def test_narrowing_by_bits_ends_in_the_same_set_as_sorting(monkeypatch, sort_at_most):
    rng = np.random.default_rng(1)
    for z in (rng.standard_normal(5000), rng.standard_normal(5000) * 1e-12, np.zeros(5000), -np.arange(5000.0)):
        w = np.exp(z - z.max())
        for share in (1e-9, 0.3, 0.999):
            by_sorting = filters._keep_by_sorting(z, w, share * w.sum())
            monkeypatch.setattr(filters, "SORT_AT_MOST", sort_at_most)
            assert filters._keep_by_bits(z, w, share * w.sum()).tolist() == by_sorting.tolist()
            monkeypatch.undo()


def test_top_p_refers_to_what_the_earlier_filters_left():
    w = np.array([0.4, 0.3, 0.1, 0.1, 0.1]) / 0.4
    z = np.log(w)
    assert keep(z, w, float(w.sum()), SamplingParams(top_p=0.5)).tolist() == [0, 1]
    assert keep(z, w, float(w.sum()), SamplingParams(min_p=0.3, top_p=0.5)).tolist() == [0]
    assert keep(z, w, float(w.sum()), SamplingParams(top_k=2, top_p=0.5)).tolist() == [0]


def test_candidates_that_are_exactly_the_top_k_still_bound_top_p():
    """The device hands over no more than top_k asks for; W is their mass, not the row's."""
    w = np.array([1.0, 0.75])
    assert keep(np.log(w), w, 2.5, SamplingParams(top_k=2, top_p=0.5)).tolist() == [0]


def test_nothing_to_filter_is_said_without_a_list():
    z = np.zeros(4)
    assert keep(z, np.exp(z), 4.0, SamplingParams()) is None
    assert keep(z, np.exp(z), 4.0, SamplingParams(top_k=4)) is None


def test_ties_at_the_last_place_go_to_the_lower_ids():
    z = np.zeros(4_000, np.float32)
    z[1_000:1_400] = 1.0
    kept = keep(z, np.exp(z.astype(np.float64) - 1), 0.0, SamplingParams(top_k=300, top_p=0.5))
    assert kept.tolist() == list(range(1_000, 1_150))
