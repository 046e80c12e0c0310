"""Whom to ask for what, so that few calls read every key from enough replicas."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dht.small_swarm import choose_replicas

KEYS = tuple(range(16))
swarms = st.dictionaries(
    st.sampled_from(KEYS), st.lists(st.sampled_from("abcdefgh"), max_size=5, unique=True), max_size=16
)


@given(swarms, st.data(), st.permutations("abcdefgh"))
def test_every_key_is_read_from_as_many_replicas_as_wanted_and_there_are(replicas, data, candidates):
    copies = {key: data.draw(st.integers(0, 3)) for key in replicas}
    plan = choose_replicas(replicas, copies, candidates)
    for key, nodes in replicas.items():
        asked = [node for node, keys in plan.items() if key in keys]
        assert len(asked) == min(copies[key], len(nodes))
        assert set(asked) <= set(nodes)
    assert all(plan.values()), "a node is asked for nothing"


def test_swarm_of_six_is_read_with_one_call():
    """Everybody keeps everything: beside our own copy one more is enough."""
    replicas = {key: ["a", "b", "c", "d", "e"] for key in KEYS}
    assert choose_replicas(replicas, dict.fromkeys(KEYS, 1), "abcde") == {"a": list(KEYS)}


def test_earlier_candidate_is_asked_first():
    """The caller puts those that answered last time in front."""
    replicas = {key: ["a", "b", "c", "d", "e"] for key in KEYS}
    assert list(choose_replicas(replicas, dict.fromkeys(KEYS, 2), "edcba")) == ["e", "d"]
