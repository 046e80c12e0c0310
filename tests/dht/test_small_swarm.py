"""Whom to ask for what, so that few calls read every key from enough replicas."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from dht.small_swarm import choose_replicas

KEYS = tuple(range(16))
swarms = st.dictionaries(
    st.sampled_from(KEYS), st.lists(st.sampled_from("abcdefgh"), max_size=5, unique=True), max_size=16
)


@given(swarms, st.data(), st.integers(0, 1000))
def test_every_key_is_read_from_as_many_replicas_as_wanted_and_there_are(replicas, data, seed):
    copies = {key: data.draw(st.integers(0, 3)) for key in replicas}
    plan = choose_replicas(replicas, copies, random.Random(seed))
    for key, nodes in replicas.items():
        asked = [node for node, keys in plan.items() if key in keys]
        assert len(asked) == min(copies[key], len(nodes))
        assert set(asked) <= set(nodes)
    assert all(plan.values()), "a node is asked for nothing"


def test_swarm_of_six_is_read_with_one_call():
    """Everybody keeps everything: beside our own copy one more is enough."""
    replicas = {key: ["a", "b", "c", "d", "e"] for key in KEYS}
    plan = choose_replicas(replicas, dict.fromkeys(KEYS, 1), random.Random(1))
    assert len(plan) == 1


def test_polls_take_turns():
    """A replica that missed a store is outvoted at the next poll."""
    replicas = {key: ["a", "b", "c", "d", "e"] for key in KEYS}
    rng = random.Random(1)
    asked = {node for _ in range(40) for node in choose_replicas(replicas, dict.fromkeys(KEYS, 1), rng)}
    assert asked == {"a", "b", "c", "d", "e"}


def test_same_seed_asks_the_same():
    replicas = {key: list("abcdefgh"[key % 4 : key % 4 + 5]) for key in KEYS}
    plans = [choose_replicas(replicas, dict.fromkeys(KEYS, 2), random.Random(3)) for _ in range(2)]
    assert plans[0] == plans[1]
