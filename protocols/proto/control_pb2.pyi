from google.protobuf import empty_pb2 as _empty_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRequest(_message.Message):
    __slots__ = ("interval_s",)
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    def __init__(self, interval_s: _Optional[float] = ...) -> None: ...

class ValidationPoint(_message.Message):
    __slots__ = ("round", "loss", "num_microbatches")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    NUM_MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    round: int
    loss: float
    num_microbatches: int
    def __init__(self, round: _Optional[int] = ..., loss: _Optional[float] = ..., num_microbatches: _Optional[int] = ...) -> None: ...

class PeerInfo(_message.Message):
    __slots__ = ("peer", "stage", "state", "round", "outer_step", "slots", "forward_s", "grad_norm", "started_unix_s", "fresh", "backward_s", "upload_bytes_per_s", "download_bytes_per_s", "coordinate", "link_numbers", "link_s")
    PEER_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_S_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    COORDINATE_FIELD_NUMBER: _ClassVar[int]
    LINK_NUMBERS_FIELD_NUMBER: _ClassVar[int]
    LINK_S_FIELD_NUMBER: _ClassVar[int]
    peer: str
    stage: int
    state: str
    round: int
    outer_step: int
    slots: int
    forward_s: float
    grad_norm: float
    started_unix_s: float
    fresh: bool
    backward_s: float
    upload_bytes_per_s: float
    download_bytes_per_s: float
    coordinate: _containers.RepeatedScalarFieldContainer[float]
    link_numbers: _containers.RepeatedScalarFieldContainer[int]
    link_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, peer: _Optional[str] = ..., stage: _Optional[int] = ..., state: _Optional[str] = ..., round: _Optional[int] = ..., outer_step: _Optional[int] = ..., slots: _Optional[int] = ..., forward_s: _Optional[float] = ..., grad_norm: _Optional[float] = ..., started_unix_s: _Optional[float] = ..., fresh: bool = ..., backward_s: _Optional[float] = ..., upload_bytes_per_s: _Optional[float] = ..., download_bytes_per_s: _Optional[float] = ..., coordinate: _Optional[_Iterable[float]] = ..., link_numbers: _Optional[_Iterable[int]] = ..., link_s: _Optional[_Iterable[float]] = ...) -> None: ...

class PeerStatus(_message.Message):
    __slots__ = ("peer", "name", "run_id", "stage", "state", "device", "paused", "round", "total_rounds", "outer_step", "loss", "validation", "tokens", "tokens_per_s", "num_in_flight", "queue_depth", "counters", "addresses", "peers", "uptime_s", "events", "planned_round_s", "apart", "cosine", "outer_wait_s")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PEER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TOTAL_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PLANNED_ROUND_S_FIELD_NUMBER: _ClassVar[int]
    APART_FIELD_NUMBER: _ClassVar[int]
    COSINE_FIELD_NUMBER: _ClassVar[int]
    OUTER_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    peer: str
    name: str
    run_id: str
    stage: int
    state: str
    device: str
    paused: bool
    round: int
    total_rounds: int
    outer_step: int
    loss: float
    validation: _containers.RepeatedCompositeFieldContainer[ValidationPoint]
    tokens: int
    tokens_per_s: float
    num_in_flight: int
    queue_depth: int
    counters: _containers.ScalarMap[str, float]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    peers: _containers.RepeatedCompositeFieldContainer[PeerInfo]
    uptime_s: float
    events: _containers.RepeatedScalarFieldContainer[str]
    planned_round_s: float
    apart: float
    cosine: float
    outer_wait_s: float
    def __init__(self, peer: _Optional[str] = ..., name: _Optional[str] = ..., run_id: _Optional[str] = ..., stage: _Optional[int] = ..., state: _Optional[str] = ..., device: _Optional[str] = ..., paused: bool = ..., round: _Optional[int] = ..., total_rounds: _Optional[int] = ..., outer_step: _Optional[int] = ..., loss: _Optional[float] = ..., validation: _Optional[_Iterable[_Union[ValidationPoint, _Mapping]]] = ..., tokens: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., num_in_flight: _Optional[int] = ..., queue_depth: _Optional[int] = ..., counters: _Optional[_Mapping[str, float]] = ..., addresses: _Optional[_Iterable[str]] = ..., peers: _Optional[_Iterable[_Union[PeerInfo, _Mapping]]] = ..., uptime_s: _Optional[float] = ..., events: _Optional[_Iterable[str]] = ..., planned_round_s: _Optional[float] = ..., apart: _Optional[float] = ..., cosine: _Optional[float] = ..., outer_wait_s: _Optional[float] = ...) -> None: ...

class PeersReply(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[PeerInfo]
    def __init__(self, peers: _Optional[_Iterable[_Union[PeerInfo, _Mapping]]] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ("folder",)
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    folder: str
    def __init__(self, folder: _Optional[str] = ...) -> None: ...

class CheckpointReply(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...
