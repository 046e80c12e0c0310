"""Which stage orders are legal."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.stage_order import is_legal, legal_orders, num_swaps


def test_six_stages_of_which_four_run_have_twenty_two_orders():
    """Counted by hand: K = 6, L = 4, one swap."""
    assert len(legal_orders(6, 4, swaps_max=1, skip_width_max=4)) == 22


def test_without_skips_and_swaps_there_is_one_order():
    assert legal_orders(5, 5, swaps_max=0, skip_width_max=4) == ((0, 1, 2, 3, 4),)


def test_orders_without_swaps_come_first():
    """Ties between equal orders go to the front of the list, and a swap costs quality."""
    orders = legal_orders(5, 4, swaps_max=1, skip_width_max=4)
    swaps = [num_swaps(order) for order in orders]
    assert swaps == sorted(swaps)
    assert len(set(orders)) == len(orders)


def test_a_missing_stage_is_in_no_order():
    orders = legal_orders(5, 4, swaps_max=1, skip_width_max=4, missing=frozenset({2}))
    assert orders == ((0, 1, 3, 4), (0, 1, 4, 3))


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ((1, 0, 2), "does not start at the first stage"),
        ((0, 1), "too short"),
        ((0, 1, 1), "a stage twice"),
        ((0, 4, 1), "goes back by more than one"),
        ((0, 1, 9), "no such stage"),
    ],
)
def test_the_checker_refuses(order: tuple[int, ...], why: str):
    assert not is_legal(order, 5, 3, swaps_max=1, skip_width_max=4), why


@given(st.integers(2, 6), st.data())
def test_enumeration_and_checker_agree(num_stages: int, data: st.DataObject):
    """Two readings of the rules, written apart: exactly the legal ones among all arrangements are listed."""
    path_stages = data.draw(st.integers(2, num_stages))
    rules = {"swaps_max": data.draw(st.integers(0, 2)), "skip_width_max": data.draw(st.integers(1, 4))}
    listed = set(legal_orders(num_stages, path_stages, **rules))
    arrangements = permutations(range(num_stages), path_stages)
    assert listed == {order for order in arrangements if is_legal(order, num_stages, path_stages, **rules)}
