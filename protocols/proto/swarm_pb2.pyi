from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNKNOWN: _ClassVar[Codec]
    CODEC_RAW: _ClassVar[Codec]
    CODEC_BF16: _ClassVar[Codec]
    CODEC_INT8: _ClassVar[Codec]
    CODEC_INT4: _ClassVar[Codec]
    CODEC_TOPK: _ClassVar[Codec]

class WeightsKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WEIGHTS_UNKNOWN: _ClassVar[WeightsKind]
    WEIGHTS_FULL: _ClassVar[WeightsKind]
    WEIGHTS_ALONE: _ClassVar[WeightsKind]
    WEIGHTS_SHADOW: _ClassVar[WeightsKind]
CODEC_UNKNOWN: Codec
CODEC_RAW: Codec
CODEC_BF16: Codec
CODEC_INT8: Codec
CODEC_INT4: Codec
CODEC_TOPK: Codec
WEIGHTS_UNKNOWN: WeightsKind
WEIGHTS_FULL: WeightsKind
WEIGHTS_ALONE: WeightsKind
WEIGHTS_SHADOW: WeightsKind

class Envelope(_message.Message):
    __slots__ = ("protocol", "run_tag", "round_plan", "boundary_activation", "boundary_gradient", "release", "undeliverable", "outer_offer", "outer_exchange", "outer_accept", "weights_request", "weights_chunk")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_TAG_FIELD_NUMBER: _ClassVar[int]
    ROUND_PLAN_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    UNDELIVERABLE_FIELD_NUMBER: _ClassVar[int]
    OUTER_OFFER_FIELD_NUMBER: _ClassVar[int]
    OUTER_EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    OUTER_ACCEPT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_REQUEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_CHUNK_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_tag: bytes
    round_plan: RoundPlan
    boundary_activation: BoundaryActivation
    boundary_gradient: BoundaryGradient
    release: Release
    undeliverable: Undeliverable
    outer_offer: OuterOffer
    outer_exchange: OuterExchange
    outer_accept: OuterAccept
    weights_request: WeightsRequest
    weights_chunk: WeightsChunk
    def __init__(self, protocol: _Optional[int] = ..., run_tag: _Optional[bytes] = ..., round_plan: _Optional[_Union[RoundPlan, _Mapping]] = ..., boundary_activation: _Optional[_Union[BoundaryActivation, _Mapping]] = ..., boundary_gradient: _Optional[_Union[BoundaryGradient, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., undeliverable: _Optional[_Union[Undeliverable, _Mapping]] = ..., outer_offer: _Optional[_Union[OuterOffer, _Mapping]] = ..., outer_exchange: _Optional[_Union[OuterExchange, _Mapping]] = ..., outer_accept: _Optional[_Union[OuterAccept, _Mapping]] = ..., weights_request: _Optional[_Union[WeightsRequest, _Mapping]] = ..., weights_chunk: _Optional[_Union[WeightsChunk, _Mapping]] = ...) -> None: ...

class TensorHead(_message.Message):
    __slots__ = ("dtype", "shape", "codec", "num_bytes")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    codec: Codec
    num_bytes: int
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., codec: _Optional[_Union[Codec, str]] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class WorkKey(_message.Message):
    __slots__ = ("originator", "counter", "attempt")
    ORIGINATOR_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    originator: str
    counter: int
    attempt: int
    def __init__(self, originator: _Optional[str] = ..., counter: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class WorkKeys(_message.Message):
    __slots__ = ("originator", "counters", "attempts")
    ORIGINATOR_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    originator: str
    counters: _containers.RepeatedScalarFieldContainer[int]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, originator: _Optional[str] = ..., counters: _Optional[_Iterable[int]] = ..., attempts: _Optional[_Iterable[int]] = ...) -> None: ...

class Hop(_message.Message):
    __slots__ = ("stage", "peer")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    stage: int
    peer: str
    def __init__(self, stage: _Optional[int] = ..., peer: _Optional[str] = ...) -> None: ...

class RoundPlan(_message.Message):
    __slots__ = ("round", "keys")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    round: int
    keys: WorkKeys
    def __init__(self, round: _Optional[int] = ..., keys: _Optional[_Union[WorkKeys, _Mapping]] = ...) -> None: ...

class BoundaryActivation(_message.Message):
    __slots__ = ("key", "round", "path", "hop", "train", "tensor")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    HOP_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    key: WorkKey
    round: int
    path: _containers.RepeatedCompositeFieldContainer[Hop]
    hop: int
    train: bool
    tensor: TensorHead
    def __init__(self, key: _Optional[_Union[WorkKey, _Mapping]] = ..., round: _Optional[int] = ..., path: _Optional[_Iterable[_Union[Hop, _Mapping]]] = ..., hop: _Optional[int] = ..., train: bool = ..., tensor: _Optional[_Union[TensorHead, _Mapping]] = ...) -> None: ...

class BoundaryGradient(_message.Message):
    __slots__ = ("key", "hop", "tensor")
    KEY_FIELD_NUMBER: _ClassVar[int]
    HOP_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    key: WorkKey
    hop: int
    tensor: TensorHead
    def __init__(self, key: _Optional[_Union[WorkKey, _Mapping]] = ..., hop: _Optional[int] = ..., tensor: _Optional[_Union[TensorHead, _Mapping]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: WorkKeys
    def __init__(self, keys: _Optional[_Union[WorkKeys, _Mapping]] = ...) -> None: ...

class Undeliverable(_message.Message):
    __slots__ = ("key", "unreachable")
    KEY_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    key: WorkKey
    unreachable: str
    def __init__(self, key: _Optional[_Union[WorkKey, _Mapping]] = ..., unreachable: _Optional[str] = ...) -> None: ...

class OuterOffer(_message.Message):
    __slots__ = ("stage", "outer_step", "pair_round", "microbatches")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    PAIR_ROUND_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    stage: int
    outer_step: int
    pair_round: int
    microbatches: int
    def __init__(self, stage: _Optional[int] = ..., outer_step: _Optional[int] = ..., pair_round: _Optional[int] = ..., microbatches: _Optional[int] = ...) -> None: ...

class OuterExchange(_message.Message):
    __slots__ = ("stage", "outer_step", "pair_round", "schema", "tensor")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    PAIR_ROUND_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    stage: int
    outer_step: int
    pair_round: int
    schema: str
    tensor: TensorHead
    def __init__(self, stage: _Optional[int] = ..., outer_step: _Optional[int] = ..., pair_round: _Optional[int] = ..., schema: _Optional[str] = ..., tensor: _Optional[_Union[TensorHead, _Mapping]] = ...) -> None: ...

class OuterAccept(_message.Message):
    __slots__ = ("stage", "outer_step", "pair_round", "ok")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    PAIR_ROUND_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    stage: int
    outer_step: int
    pair_round: int
    ok: bool
    def __init__(self, stage: _Optional[int] = ..., outer_step: _Optional[int] = ..., pair_round: _Optional[int] = ..., ok: bool = ...) -> None: ...

class WeightsRequest(_message.Message):
    __slots__ = ("kind", "stage", "snapshot", "index")
    KIND_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    kind: WeightsKind
    stage: int
    snapshot: str
    index: int
    def __init__(self, kind: _Optional[_Union[WeightsKind, str]] = ..., stage: _Optional[int] = ..., snapshot: _Optional[str] = ..., index: _Optional[int] = ...) -> None: ...

class WeightsChunk(_message.Message):
    __slots__ = ("kind", "stage", "snapshot", "index", "count", "sha256", "round", "outer_step", "tensor")
    KIND_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    kind: WeightsKind
    stage: int
    snapshot: str
    index: int
    count: int
    sha256: str
    round: int
    outer_step: int
    tensor: TensorHead
    def __init__(self, kind: _Optional[_Union[WeightsKind, str]] = ..., stage: _Optional[int] = ..., snapshot: _Optional[str] = ..., index: _Optional[int] = ..., count: _Optional[int] = ..., sha256: _Optional[str] = ..., round: _Optional[int] = ..., outer_step: _Optional[int] = ..., tensor: _Optional[_Union[TensorHead, _Mapping]] = ...) -> None: ...
