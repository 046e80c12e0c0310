"""Who may say what: each check with the story behind it, then a hundred thousand bad messages (bar F5)."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import psutil
import pytest

from peer.model.stage import build_stage
from protocols.admission import WireLimits, admit, stage_parameters
from protocols.errors import RemoteProtocolError
from protocols.messages import (
    BoundaryActivation,
    BoundaryGradient,
    Hop,
    Message,
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
from protocols.proto import swarm_pb2 as pb
from protocols.run_spec import Codec, preset
from protocols.wire import encode, run_tag

SPEC = preset("pico", rounds={"rows": 2, "seq_len": 8})
LIMITS = WireLimits.of(SPEC)
KEY = WorkKey("a1", 41, 2)
PATH = (Hop(0, "a1"), Hop(2, "c1"), Hop(1, "b1"))
ELEMENTS = int(np.prod(SPEC.boundary_shape))


def boundary(codec: Codec = Codec.RAW, fill: float = 1.0) -> TensorPacket:
    numbers = np.full(ELEMENTS, fill, np.float32)
    data = (
        numbers.tobytes()
        if codec is Codec.RAW
        else (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    )
    return TensorPacket(dtype="float32", shape=SPEC.boundary_shape, codec=codec, data=data)


def flat(num: int, fill: float = 1.0) -> TensorPacket:
    data = np.full(num, fill, np.float32).tobytes()
    return TensorPacket(dtype="float32", shape=(num,), codec=Codec.RAW, data=data)


def activation(**changes: object) -> BoundaryActivation:
    whole = BoundaryActivation(key=KEY, round=3, path=PATH, hop=1, train=True, packet=boundary())
    return replace(whole, **changes)  # type: ignore[arg-type]


def chunk(**changes: object) -> WeightsChunk:
    packet = TensorPacket(dtype="uint8", shape=(5,), codec=Codec.RAW, data=b"abcde")
    whole = WeightsChunk(
        kind=WeightsKind.FULL,
        stage=1,
        snapshot="s1",
        index=0,
        count=2,
        sha256="00",
        round=1,
        outer_step=0,
        packet=packet,
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def said(message: Message, *, sender: str, me: str) -> Message:
    header, data = encode(message, run_id=SPEC.run_id)
    return admit(header, bytes(data), sender=sender, me=me, limits=LIMITS)


def refusal(message: Message, *, sender: str, me: str) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        said(message, sender=sender, me=me)
    return caught.value.reason


GOOD = [
    (RoundPlan(round=3, keys=(KEY,)), "a1", "b1"),
    (RoundPlan(round=1 << 40, keys=()), "a1", "b1"),
    (activation(), "a1", "c1"),
    (activation(packet=boundary(Codec.BF16)), "a1", "c1"),
    (activation(hop=2), "c1", "b1"),
    (activation(hop=3), "b1", "a1"),
    (BoundaryGradient(key=KEY, hop=2, packet=boundary()), "a1", "b1"),
    (BoundaryGradient(key=KEY, hop=0, packet=boundary()), "c1", "a1"),
    (Release(keys=(KEY, WorkKey("a1", 41, 3))), "a1", "b1"),
    (Undeliverable(key=KEY, unreachable="c1"), "b1", "a1"),
    (OuterOffer(stage=1, outer_step=4, pair_round=0, microbatches=1), "b1", "b2"),
    (OuterExchange(stage=1, outer_step=4, pair_round=0, schema="s", packet=flat(64)), "b1", "b2"),
    (OuterAccept(stage=1, outer_step=4, pair_round=0, ok=True), "b1", "b2"),
    (WeightsRequest(kind=WeightsKind.FULL, stage=1, snapshot="", index=0), "b1", "b2"),
    (chunk(), "b1", "b2"),
    (chunk(count=0, packet=None), "b1", "b2"),
]


@pytest.mark.parametrize(("message", "sender", "me"), GOOD)
def test_what_peers_say_in_a_normal_round_passes(message, sender, me):
    assert said(message, sender=sender, me=me) == message


@pytest.mark.parametrize(
    ("message", "sender", "me", "reason"),
    [
        (activation(), "c1", "c1", "own-message"),
        (activation(), "b1", "c1", "not-the-hop-before"),
        (activation(hop=2), "c1", "x9", "wrong-receiver"),
        (activation(hop=0), "a1", "c1", "hop-out-of-range"),
        (activation(hop=4), "b1", "a1", "hop-out-of-range"),
        (activation(hop=2**62), "b1", "a1", "hop-out-of-range"),
        (activation(path=PATH[:1]), "a1", "c1", "bad-path-length"),
        (activation(path=(*PATH, Hop(2, "c2"))), "a1", "c1", "bad-path-length"),
        (activation(path=PATH[1:]), "a1", "c1", "path-without-originator"),
        (activation(key=WorkKey("z9", 1, 1)), "a1", "c1", "path-without-originator"),
        (activation(path=(PATH[0], Hop(2, "c1"), Hop(2, "c2"))), "a1", "c1", "stage-repeated"),
        (activation(path=(PATH[0], Hop(2, "c1"), Hop(1, "c1"))), "a1", "c1", "peer-repeated"),
        (activation(path=(PATH[0], Hop(7, "c1"))), "a1", "c1", "stage-out-of-range"),
        (activation(path=(PATH[0], Hop(0, "c1"))), "a1", "c1", "stage-out-of-range"),
        (activation(packet=replace(boundary(), shape=(2, 8, 1))), "a1", "c1", "wrong-shape"),
        (activation(packet=replace(boundary(), dtype="uint8")), "a1", "c1", "wrong-dtype"),
        (activation(packet=replace(boundary(), data=b"1234")), "a1", "c1", "wrong-size"),
        (activation(packet=replace(boundary(), data=bytes(4 * ELEMENTS + 1))), "a1", "c1", "tensor-too-long"),
        (activation(packet=boundary(fill=float("nan"))), "a1", "c1", "non-finite"),
        (activation(packet=boundary(Codec.BF16, float("inf"))), "a1", "c1", "non-finite"),
        (BoundaryGradient(key=KEY, hop=0, packet=boundary()), "c1", "b1", "wrong-receiver"),
        (BoundaryGradient(key=KEY, hop=1, packet=boundary()), "c1", "a1", "wrong-receiver"),
        (BoundaryGradient(key=KEY, hop=3, packet=boundary()), "c1", "b1", "hop-out-of-range"),
        (Release(keys=(KEY,)), "b1", "c1", "not-the-originator"),
        (RoundPlan(round=3, keys=(KEY,)), "b1", "c1", "not-the-originator"),
        (RoundPlan(round=3, keys=(KEY,) * (LIMITS.keys_max + 1)), "a1", "c1", "too-many-keys"),
        (Undeliverable(key=KEY, unreachable="c1"), "b1", "c1", "wrong-receiver"),
        (OuterOffer(stage=3, outer_step=4, pair_round=0, microbatches=1), "b1", "b2", "stage-out-of-range"),
        (OuterAccept(stage=3, outer_step=4, pair_round=0, ok=True), "b1", "b2", "stage-out-of-range"),
        (
            WeightsRequest(kind=WeightsKind.FULL, stage=3, snapshot="", index=0),
            "b1",
            "b2",
            "stage-out-of-range",
        ),
        (
            OuterExchange(stage=3, outer_step=4, pair_round=0, schema="s", packet=flat(3)),
            "b1",
            "b2",
            "stage-out-of-range",
        ),
        (
            OuterExchange(stage=1, outer_step=4, pair_round=0, schema="s", packet=boundary()),
            "b1",
            "b2",
            "wrong-shape",
        ),
        (
            OuterExchange(stage=1, outer_step=4, pair_round=0, schema="s", packet=flat(3, float("inf"))),
            "b1",
            "b2",
            "non-finite",
        ),
        (
            OuterExchange(
                stage=1, outer_step=4, pair_round=0, schema="s", packet=flat(LIMITS.exchange_bytes_max)
            ),
            "b1",
            "b2",
            "tensor-too-long",
        ),
        (
            OuterExchange(
                stage=1,
                outer_step=4,
                pair_round=0,
                schema="s",
                packet=replace(flat(3), codec=Codec.INT8, shape=(2**62,)),
            ),
            "b1",
            "b2",
            "wrong-shape",
        ),
        (chunk(stage=3), "b1", "b2", "stage-out-of-range"),
        (chunk(index=2), "b1", "b2", "chunk-out-of-range"),
        (chunk(count=2**40), "b1", "b2", "too-many-chunks"),
        (chunk(count=0), "b1", "b2", "chunk-without-data"),
        (chunk(packet=None), "b1", "b2", "chunk-without-data"),
        (chunk(packet=replace(flat(3), data=bytes(5 << 20))), "b1", "b2", "tensor-too-long"),
        (chunk(packet=replace(flat(3), shape=(2**40,))), "b1", "b2", "wrong-shape"),
        (chunk(packet=replace(flat(3), shape=(1, 3))), "b1", "b2", "wrong-shape"),
    ],
)
def test_each_lie_has_its_reason(message, sender, me, reason):
    """The reason is a counter's label: whoever reads it must see which rule was broken."""
    assert refusal(message, sender=sender, me=me) == reason


@pytest.mark.parametrize("name", ["pico", "nano", "micro"])
def test_the_cap_of_an_exchange_follows_the_real_stages(name):
    """Too small a cap would refuse every partner; too large a one would let strangers fill the memory."""
    spec = preset(name)
    for stage in range(spec.num_stages):
        built = sum(parameter.numel() for parameter in build_stage(spec, stage).parameters())
        assert stage_parameters(spec, stage) == built
        assert 4 * built <= WireLimits.of(spec).exchange_bytes_max


# ---- F5 ----------------------------------------------------------------------------------------------------


class Mischief:
    """An endless, seeded source of messages that no honest peer sends."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._frames = [(*encode(message, run_id=SPEC.run_id), sender, me) for message, sender, me in GOOD]
        self._frames = [(header, bytes(data), sender, me) for header, data, sender, me in self._frames]
        self._big = bytes(LIMITS.tensor_bytes_max + 1)
        self._kinds = [
            self._noise, self._mutated, self._truncated_header, self._truncated_tensor, self._longer_tensor,
            self._other_run, self._other_sender, self._other_receiver, self._huge_integer, self._non_finite,
            self._spliced, self._oversized,
        ]  # fmt: skip

    def one(self) -> tuple[bytes, bytes, str, str]:
        return self._random.choice(self._kinds)(*self._random.choice(self._frames))

    def _noise(self, header: bytes, data: bytes, sender: str, me: str):
        return self._random.randbytes(self._random.randrange(200)), data, sender, me

    def _mutated(self, header: bytes, data: bytes, sender: str, me: str):
        changed = bytearray(header)
        for _ in range(self._random.randint(1, 4)):
            changed[self._random.randrange(len(changed))] = self._random.randrange(256)
        return bytes(changed), data, sender, me

    def _truncated_header(self, header: bytes, data: bytes, sender: str, me: str):
        return header[: self._random.randrange(len(header))], data, sender, me

    def _truncated_tensor(self, header: bytes, data: bytes, sender: str, me: str):
        return header, data[: self._random.randrange(len(data) or 1)], sender, me

    def _longer_tensor(self, header: bytes, data: bytes, sender: str, me: str):
        return header, data + self._random.randbytes(self._random.randint(1, 64)), sender, me

    def _other_run(self, header: bytes, data: bytes, sender: str, me: str):
        return header.replace(run_tag(SPEC.run_id), self._random.randbytes(16)), data, sender, me

    def _other_sender(self, header: bytes, data: bytes, sender: str, me: str):
        return header, data, self._random.choice(("a1", "b1", "b2", "c1", "z9")), me

    def _other_receiver(self, header: bytes, data: bytes, sender: str, me: str):
        return header, data, sender, self._random.choice(("a1", "b1", "b2", "c1", "z9"))

    def _huge_integer(self, header: bytes, data: bytes, sender: str, me: str):
        """-1, 2^63, 2^64 - 1 in a field that was small."""
        envelope = pb.Envelope.FromString(header)
        body = getattr(envelope, envelope.WhichOneof("body") or "")
        names = [
            field.name
            for field in body.DESCRIPTOR.fields
            if field.name in ("stage", "hop", "round", "index", "count", "outer_step")
        ]
        value = self._random.choice((1 << 31, 1 << 63, (1 << 64) - 1))
        if names:
            setattr(body, self._random.choice(names), value)
        elif hasattr(body, "keys"):
            body.keys.counters.append(value)  # ragged, too
        else:
            body.key.attempt = value
        return envelope.SerializeToString(), data, sender, me

    def _non_finite(self, header: bytes, data: bytes, sender: str, me: str):
        where = 4 * self._random.randrange(max(1, len(data) // 4))
        bad = self._random.choice((b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x00\x00\x80\xff"))
        return header, data[:where] + bad + data[where + 4 :], sender, me

    def _spliced(self, header: bytes, data: bytes, sender: str, me: str):
        other = self._random.choice(self._frames)
        return header, other[1], sender, me

    def _oversized(self, header: bytes, data: bytes, sender: str, me: str):
        envelope = pb.Envelope.FromString(header)
        body = getattr(envelope, envelope.WhichOneof("body") or "")
        if not hasattr(body, "tensor"):
            return header + bytes(256 << 10), data, sender, me
        body.tensor.num_bytes = self._random.choice((len(self._big), 1 << 40, (1 << 64) - 1))
        return envelope.SerializeToString(), self._big, sender, me


def outcome(header: bytes, data: bytes, sender: str, me: str) -> str:
    try:
        message = admit(header, data, sender=sender, me=me, limits=LIMITS)
    except RemoteProtocolError as error:
        return error.reason
    assert encode(message, run_id=SPEC.run_id)
    return "passed"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_hundred_thousand_bad_messages_are_counted_and_leave_nothing_behind():
    """A hostile peer, or a broken fork, sends nonsense for hours: each is refused with a reason, memory stays flat.

    What passes by chance (a changed round number, a message that another peer might have sent) is a good message.
    """
    mischief = Mischief(seed=5)
    reasons: Counter[str] = Counter()
    held = []
    for count in range(100_000):
        reasons[outcome(*mischief.one())] += 1
        if count % 20_000 == 0:
            held.append(psutil.Process().memory_info().rss)
    assert reasons.total() == 100_000
    assert reasons["passed"] < 30_000
    assert {"not-protobuf", "other-run", "no-body", "wrong-size", "non-finite", "wrong-receiver", "not-the-originator",
            "integer-out-of-range", "tensor-too-long", "header-too-long"} <= set(reasons)  # fmt: skip
    assert held[-1] - held[1] < 4 << 20, f"memory grew: {held}"
