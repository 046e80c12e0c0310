"""Messages to bytes and back, and bytes that are no messages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.messages import OuterOffer, Release, RoundPlan, TensorPacket, Undeliverable, WorkKey
from protocols.proto import swarm_pb2 as pb
from protocols.run_spec import PROTOCOL_VERSION, Codec
from protocols.wire import HEADER_BYTES_MAX, INTEGER_MAX, KEYS_MAX, decode, encode, run_tag
from tests.protocols.sentences import messages, packets

RUN = "demo-0123456789abcdef"


def envelope(**body: object) -> bytes:
    return pb.Envelope(protocol=PROTOCOL_VERSION, run_tag=run_tag(RUN), **body).SerializeToString()  # type: ignore[arg-type]


def refusal(header: bytes) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(header, run_id=RUN)
    return caught.value.reason


def said_again(header: bytes) -> bytes | str:
    """The message in our own words, or the reason why it is none."""
    try:
        message = decode(header, run_id=RUN).message
    except RemoteProtocolError as error:
        return error.reason
    return encode(message, run_id=RUN)[0]


@given(messages)
def test_every_message_comes_back_as_it_was(message):
    """What one peer says is what the other hears; the tensor is never in the header."""
    header, data = encode(message, run_id=RUN)
    partial = decode(header, run_id=RUN)
    assert partial.tensor_bytes == len(data)
    assert partial.finish(bytes(data)) == message


@given(messages)
def test_a_tensor_is_sent_from_where_it_lies(message):
    """No copy of 8 MiB for each hop: the bytes to send are the packet's own memory."""
    _, data = encode(message, run_id=RUN)
    packet = getattr(message, "packet", None)
    assert packet is None or data.obj is packet.data


@given(st.binary(max_size=400))
def test_random_bytes_raise_only_a_remote_protocol_error(header):
    """A scanner, another program, a bug of a fork: all end as one counted reason."""
    with pytest.raises(RemoteProtocolError):
        decode(header, run_id=RUN)


@given(messages, st.data())
def test_damaged_headers_are_refused_or_still_a_message(message, data):
    """One byte changed, or the end cut off: either a reason or a well-formed message, nothing else."""
    header, _ = encode(message, run_id=RUN)
    where = data.draw(st.integers(0, len(header) - 1))
    changed = bytearray(header)
    changed[where] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(changed), header[:where]):
        assert said_again(damaged)


@given(packets, st.integers(-300, 300))
def test_data_of_another_length_than_announced_is_refused(packet, error):
    """A truncated tensor must not reach the decoder, which would read beyond it."""
    from protocols.messages import OuterExchange

    header, data = encode(
        OuterExchange(stage=1, outer_step=2, pair_round=0, schema="s", packet=packet), run_id=RUN
    )
    length = max(0, len(data) + error)
    if length != len(data):
        with pytest.raises(RemoteProtocolError, match="wrong-size"):
            decode(header, run_id=RUN).finish(bytes(length))


def test_another_run_and_another_protocol_are_told_apart():
    """The reasons are what a volunteer with an old release, or with the wrong RunSpec, must be told."""
    message = OuterOffer(stage=1, outer_step=2, pair_round=0, microbatches=1)
    header, _ = encode(message, run_id="other-0123456789abcdef")
    assert refusal(header) == "other-run"
    newer = pb.Envelope(protocol=PROTOCOL_VERSION + 1, run_tag=run_tag(RUN))
    assert refusal(newer.SerializeToString()) == "other-protocol"


def test_a_message_of_a_newer_release_is_refused_by_name():
    """A body that this release does not know is an unknown field to protobuf: nothing is left to read."""
    unknown_field = b"\xfa\x01\x02hi"  # field 31, two bytes
    assert refusal(envelope() + unknown_field) == "no-body"


@pytest.mark.parametrize("value", [1 << 63, (1 << 64) - 1])
def test_integers_beyond_63_bits_are_refused(value):
    """-1 and 2^64-1 are the same varint; an index made of it must not reach a list or an array."""
    assert refusal(envelope(outer_offer=pb.OuterOffer(stage=value))) == "integer-out-of-range"
    key = pb.WorkKey(originator="a1", counter=value, attempt=1)
    assert (
        refusal(envelope(undeliverable=pb.Undeliverable(key=key, unreachable="a2"))) == "integer-out-of-range"
    )
    head = pb.TensorHead(dtype="float32", shape=[value], codec=pb.CODEC_RAW)
    assert refusal(envelope(outer_exchange=pb.OuterExchange(tensor=head))) == "integer-out-of-range"


def test_long_things_are_refused():
    """Each list and each text has its cap, so that a header costs no more than its own size."""
    keys = pb.WorkKeys(originator="a1", counters=[1] * (KEYS_MAX + 1), attempts=[1] * (KEYS_MAX + 1))
    assert refusal(envelope(release=pb.Release(keys=keys))) == "too-many-keys"
    assert refusal(envelope(release=pb.Release(keys=pb.WorkKeys(counters=[1])))) == "ragged-keys"
    key = pb.WorkKey(originator="a1", counter=1, attempt=1)
    path = [pb.Hop(stage=1, peer="a1")] * 257
    long_path = pb.BoundaryActivation(key=key, path=path)
    assert refusal(envelope(boundary_activation=long_path)) == "path-too-long"
    assert refusal(envelope(undeliverable=pb.Undeliverable(key=key, unreachable="x" * 65))) == "bad-peer-id"
    assert refusal(envelope(outer_exchange=pb.OuterExchange(schema="x" * 65))) == "bad-word"
    head = pb.TensorHead(dtype="float32", shape=[1] * 5, codec=pb.CODEC_RAW)
    assert refusal(envelope(outer_exchange=pb.OuterExchange(tensor=head))) == "too-many-dims"
    assert refusal(bytes(HEADER_BYTES_MAX + 1)) == "header-too-long"


def test_unknown_codes_are_refused():
    head = pb.TensorHead(dtype="complex64", codec=pb.CODEC_RAW)
    assert refusal(envelope(outer_exchange=pb.OuterExchange(tensor=head))) == "wrong-dtype"
    head = pb.TensorHead(dtype="float32", codec=77)  # type: ignore[arg-type]
    assert refusal(envelope(outer_exchange=pb.OuterExchange(tensor=head))) == "unknown-codec"
    assert refusal(envelope(weights_request=pb.WeightsRequest(kind=9))) == "unknown-kind"  # type: ignore[arg-type]
    key = pb.WorkKey(originator="a1", counter=1, attempt=0)
    assert refusal(envelope(undeliverable=pb.Undeliverable(key=key, unreachable="a1"))) == "bad-attempt"


def test_the_largest_round_plan_fits_the_header():
    """4,096 microbatches and their retries in one message, under the longest peer id."""
    keys = tuple(WorkKey("p" * 64, 2**31 + counter, 64) for counter in range(KEYS_MAX))
    plan = RoundPlan(round=INTEGER_MAX, keys=keys)
    header, _ = encode(plan, run_id=RUN)
    assert decode(header, run_id=RUN).message == plan


@pytest.mark.parametrize(
    "message",
    [
        OuterOffer(stage=-1, outer_step=0, pair_round=0, microbatches=1),
        OuterOffer(stage=1 << 64, outer_step=0, pair_round=0, microbatches=1),
        Release(keys=(WorkKey("a1", 1, 1), WorkKey("b2", 1, 1))),
        Undeliverable(key=WorkKey("a1", 1, 1), unreachable=None),  # type: ignore[arg-type]
        "not a message",
    ],
)
def test_our_own_nonsense_is_a_local_error(message):
    """A bug of ours must be seen here, not at the peer that would refuse it."""
    if isinstance(message, Undeliverable):
        message = replace(message, key=replace(message.key, counter=-1))
    with pytest.raises(LocalProtocolError):
        encode(message, run_id=RUN)


def test_an_empty_packet_has_no_bytes():
    """A chunk of an empty state is a message like any other."""
    from protocols.messages import OuterExchange

    packet = TensorPacket(dtype="float32", shape=(0,), codec=Codec.RAW, data=b"")
    message = OuterExchange(stage=1, outer_step=2, pair_round=0, schema="s", packet=packet)
    header, data = encode(message, run_id=RUN)
    assert decode(header, run_id=RUN).finish(data) == message
