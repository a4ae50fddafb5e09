"""The laws of axes: whatever is unified, split, cut or picked, sizes add up and what was one stays one."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lemonx.tracing.axes import (
    PRODUCT,
    SUM,
    Axis,
    Misfit,
    atoms,
    cut,
    data,
    factors,
    find,
    fused,
    joined,
    leaves,
    part,
    say,
    split,
    unify,
)
from lemonx.tracing.settling import mirror, pick, settle, spread

sizes = st.lists(st.integers(2, 5), min_size=1, max_size=4)


def assert_whole(axis: Axis) -> None:
    """The sizes of its parts are the size of an axis, all the way down."""
    axis = find(axis)
    if axis.kind == PRODUCT:
        assert math.prod(find(inner).size for inner in axis.parts) == axis.size
    if axis.kind == SUM:
        assert sum(find(inner).size for inner in axis.parts) == axis.size
    for inner in axis.parts:
        assert_whole(inner)


@given(sizes)
def test_an_axis_that_is_split_and_fused_again_is_the_same(numbers: list[int]) -> None:
    whole = Axis(math.prod(numbers))
    found = [axis for axis in factors(whole, numbers) if axis is not None]
    assert [axis.size for axis in found] == numbers
    assert unify(fused(*found), whole) is find(whole)
    assert_whole(whole)
    again = factors(whole, numbers)
    assert all(find(a) is find(b) for a, b in zip(found, again, strict=True) if b is not None)


@given(sizes, sizes)
def test_two_factorisations_are_unified_or_do_not_fit(one: list[int], two: list[int]) -> None:
    first, second = (fused(*(Axis(number) for number in numbers)) for numbers in (one, two))
    if first.size != second.size:
        with pytest.raises(Misfit):
            unify(first, second)
        return
    try:
        unify(first, second)
    except Misfit:
        return
    assert find(first) is find(second)
    assert_whole(first)


@given(sizes, st.data())
def test_parts_of_a_sum_are_found_again(numbers: list[int], choice: st.DataObject) -> None:
    whole, starts = Axis(sum(numbers)), [sum(numbers[:i]) for i in range(len(numbers) + 1)]
    places = list(itertools.pairwise(starts))
    found = {place: part(whole, *place) for place in places}
    for place in choice.draw(st.permutations(places)):
        again, before = part(whole, *place), found[place]
        assert again is not None and before is not None
        assert find(again) is find(before)
    assert_whole(whole)


@given(sizes)
def test_what_is_unified_with_an_axis_of_the_inputs_is_fixed(numbers: list[int]) -> None:
    axis = fused(*(Axis(number) for number in numbers))
    unify(axis, data(axis.size), "a view")
    assert all(atom.facts["fixed"] == "a view" for atom in atoms(axis))


def test_facts_reach_parts_that_are_found_later() -> None:
    axis = Axis(12)
    say(axis, "act", "relu")
    first, second = split(axis, 3)
    spread(axis)
    assert first.facts == second.facts == {"act": "relu"}


def test_unifying_joins_what_is_known_of_both() -> None:
    one, two = Axis(6), Axis(6)
    say(one, "act", "relu")
    split(two, 2)
    unify(one, two)
    spread(one)
    assert all("act" in atom.facts for atom in atoms(two))


def test_a_fused_projection_becomes_a_sum_of_what_is_selected() -> None:
    whole = Axis(24)
    three, heads, entry = split(whole, 3)[0], *split(split(whole, 3)[1], 4)
    queries, keys, values = (pick([three, heads, entry], 0, number) for number in range(3))
    for one in (keys, values):  # attention makes the heads one
        unify(queries[0] or Axis(4), one[0] or Axis(4))
    settle(whole)
    terms = leaves(whole, SUM)
    assert [find(term).size for term in terms] == [8, 8, 8]
    entries = [leaves(term, PRODUCT)[1] for term in terms]
    assert len({id(find(entry)) for entry in entries}) == 3
    assert len({id(find(leaves(term, PRODUCT)[0])) for term in terms}) == 1


def test_what_is_used_as_a_whole_too_stays_one() -> None:
    whole = Axis(24)
    three, inner = split(whole, 3)
    say(inner, "act", "a norm over all three")
    picked = [pick([three, inner], 0, number)[0] for number in range(3)]
    settle(whole)
    assert len({id(find(one)) for one in picked if one is not None}) == 1
    assert find(picked[0] or whole) is find(inner)


def test_a_mirror_has_the_structure_and_atoms_of_its_own() -> None:
    one, two = fused(Axis(2), Axis(3)), Axis(6)
    assert mirror(one, two)
    assert not mirror(one, two)
    assert [leaf.size for leaf in leaves(two, PRODUCT)] == [2, 3]
    assert not {id(find(a)) for a in atoms(one)} & {id(find(a)) for a in atoms(two)}
    with pytest.raises(Misfit):
        mirror(one, joined(Axis(2), Axis(4)))


def test_a_product_is_cut_between_its_outer_entries_only() -> None:
    first, second = cut(fused(Axis(4), Axis(3)), 6)
    assert (first.size, second.size) == (6, 6)
    with pytest.raises(Misfit):
        cut(fused(Axis(4), Axis(3)), 5)
