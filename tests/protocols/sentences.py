"""Hypothesis strategies: every message that peers can say, whether or not it is sensible to say it."""

from __future__ import annotations

from hypothesis import strategies as st

from protocols.messages import (
    BoundaryActivation,
    BoundaryGradient,
    Hop,
    OuterAccept,
    OuterExchange,
    OuterOffer,
    Release,
    RoundPlan,
    TensorPacket,
    Undeliverable,
    WeightsChunk,
    WeightsKind,
    WeightsRequest,
    WorkKey,
)
from protocols.run_spec import Codec
from protocols.wire import ATTEMPT_MAX, DIMS_MAX, DTYPES, INTEGER_MAX

integers = st.integers(0, INTEGER_MAX)
peers = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
words = st.from_regex(r"\A[A-Za-z0-9._:-]{0,64}\Z")
kinds = st.sampled_from(WeightsKind)
keys = st.builds(WorkKey, peers, integers, st.integers(1, ATTEMPT_MAX))
packets = st.builds(
    TensorPacket,
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(integers, max_size=DIMS_MAX).map(tuple),
    codec=st.sampled_from(Codec),
    data=st.binary(max_size=300),
)


@st.composite
def keys_of_one(draw: st.DrawFn) -> tuple[WorkKey, ...]:
    originator = draw(peers)
    columns = draw(st.lists(st.tuples(integers, st.integers(1, ATTEMPT_MAX)), max_size=20))
    return tuple(WorkKey(originator, counter, attempt) for counter, attempt in columns)


messages = st.one_of(
    st.builds(RoundPlan, round=integers, keys=keys_of_one()),
    st.builds(
        BoundaryActivation,
        key=keys,
        round=integers,
        path=st.lists(st.builds(Hop, integers, peers), max_size=9).map(tuple),
        hop=integers,
        train=st.booleans(),
        packet=packets,
    ),
    st.builds(BoundaryGradient, key=keys, hop=integers, packet=packets),
    st.builds(Release, keys=keys_of_one()),
    st.builds(Undeliverable, key=keys, unreachable=peers),
    st.builds(OuterOffer, stage=integers, outer_step=integers, pair_round=integers, microbatches=integers),
    st.builds(
        OuterExchange, stage=integers, outer_step=integers, pair_round=integers, schema=words, packet=packets
    ),
    st.builds(OuterAccept, stage=integers, outer_step=integers, pair_round=integers, ok=st.booleans()),
    st.builds(WeightsRequest, kind=kinds, stage=integers, snapshot=words, index=integers),
    st.builds(
        WeightsChunk,
        kind=kinds,
        stage=integers,
        snapshot=words,
        index=integers,
        count=integers,
        sha256=words,
        round=integers,
        outer_step=integers,
        packet=st.none() | packets,
    ),
)
