from outrider.v1 import common_pb2 as _common_pb2
from outrider.v1 import generation_pb2 as _generation_pb2
from outrider.v1 import learning_pb2 as _learning_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyRequest(_message.Message):
    __slots__ = ("header", "messages")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.FrameHeader
    messages: _containers.RepeatedCompositeFieldContainer[TargetCommand]
    def __init__(self, header: _Optional[_Union[_common_pb2.FrameHeader, _Mapping]] = ..., messages: _Optional[_Iterable[_Union[TargetCommand, _Mapping]]] = ...) -> None: ...

class TargetCommand(_message.Message):
    __slots__ = ("open", "open_slice", "piece", "credit", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    OPEN_SLICE_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: _common_pb2.Open
    open_slice: _common_pb2.OpenSlice
    piece: _common_pb2.Piece
    credit: _common_pb2.Credit
    close: _common_pb2.Close
    def __init__(self, open: _Optional[_Union[_common_pb2.Open, _Mapping]] = ..., open_slice: _Optional[_Union[_common_pb2.OpenSlice, _Mapping]] = ..., piece: _Optional[_Union[_common_pb2.Piece, _Mapping]] = ..., credit: _Optional[_Union[_common_pb2.Credit, _Mapping]] = ..., close: _Optional[_Union[_common_pb2.Close, _Mapping]] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("header", "messages")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.FrameHeader
    messages: _containers.RepeatedCompositeFieldContainer[TargetEvent]
    def __init__(self, header: _Optional[_Union[_common_pb2.FrameHeader, _Mapping]] = ..., messages: _Optional[_Iterable[_Union[TargetEvent, _Mapping]]] = ...) -> None: ...

class TargetEvent(_message.Message):
    __slots__ = ("commit", "closed", "failure", "prompt_logprobs")
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    commit: _common_pb2.Commit
    closed: _common_pb2.Closed
    failure: _common_pb2.Failure
    prompt_logprobs: PromptLogprobs
    def __init__(self, commit: _Optional[_Union[_common_pb2.Commit, _Mapping]] = ..., closed: _Optional[_Union[_common_pb2.Closed, _Mapping]] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("sequence_id", "position", "logprobs")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    position: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.PositionLogprobs]
    def __init__(self, sequence_id: _Optional[int] = ..., position: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.PositionLogprobs, _Mapping]]] = ...) -> None: ...

class GetTargetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTargetInfoResponse(_message.Message):
    __slots__ = ("model", "max_window", "load", "step_costs", "capabilities", "version", "methods", "info_version", "adapters", "machine", "trials", "expert_costs", "learned")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_WINDOW_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STEP_COSTS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    INFO_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    TRIALS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_COSTS_FIELD_NUMBER: _ClassVar[int]
    LEARNED_FIELD_NUMBER: _ClassVar[int]
    model: _generation_pb2.ModelInfo
    max_window: int
    load: _common_pb2.Load
    step_costs: _containers.RepeatedCompositeFieldContainer[_common_pb2.StepCost]
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    version: str
    methods: _containers.RepeatedCompositeFieldContainer[_common_pb2.DraftMethod]
    info_version: int
    adapters: _containers.RepeatedCompositeFieldContainer[_generation_pb2.Adapter]
    machine: str
    trials: _containers.RepeatedCompositeFieldContainer[_generation_pb2.DraftTrial]
    expert_costs: ExpertCosts
    learned: _containers.RepeatedCompositeFieldContainer[_learning_pb2.LearnedDraft]
    def __init__(self, model: _Optional[_Union[_generation_pb2.ModelInfo, _Mapping]] = ..., max_window: _Optional[int] = ..., load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ..., step_costs: _Optional[_Iterable[_Union[_common_pb2.StepCost, _Mapping]]] = ..., capabilities: _Optional[_Iterable[str]] = ..., version: _Optional[str] = ..., methods: _Optional[_Iterable[_Union[_common_pb2.DraftMethod, _Mapping]]] = ..., info_version: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[_generation_pb2.Adapter, _Mapping]]] = ..., machine: _Optional[str] = ..., trials: _Optional[_Iterable[_Union[_generation_pb2.DraftTrial, _Mapping]]] = ..., expert_costs: _Optional[_Union[ExpertCosts, _Mapping]] = ..., learned: _Optional[_Iterable[_Union[_learning_pb2.LearnedDraft, _Mapping]]] = ...) -> None: ...

class ExpertCosts(_message.Message):
    __slots__ = ("num_layers", "num_experts", "num_chosen", "expert_us", "along")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOSEN_FIELD_NUMBER: _ClassVar[int]
    EXPERT_US_FIELD_NUMBER: _ClassVar[int]
    ALONG_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_experts: int
    num_chosen: int
    expert_us: float
    along: float
    def __init__(self, num_layers: _Optional[int] = ..., num_experts: _Optional[int] = ..., num_chosen: _Optional[int] = ..., expert_us: _Optional[float] = ..., along: _Optional[float] = ...) -> None: ...

class ReloadWeightsRequest(_message.Message):
    __slots__ = ("model", "drain_s", "restart")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    model: str
    drain_s: int
    restart: bool
    def __init__(self, model: _Optional[str] = ..., drain_s: _Optional[int] = ..., restart: bool = ...) -> None: ...

class ReloadWeightsResponse(_message.Message):
    __slots__ = ("before", "after", "load_ms", "pause_ms", "num_sequences")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    before: _generation_pb2.ModelInfo
    after: _generation_pb2.ModelInfo
    load_ms: int
    pause_ms: int
    num_sequences: int
    def __init__(self, before: _Optional[_Union[_generation_pb2.ModelInfo, _Mapping]] = ..., after: _Optional[_Union[_generation_pb2.ModelInfo, _Mapping]] = ..., load_ms: _Optional[int] = ..., pause_ms: _Optional[int] = ..., num_sequences: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: _generation_pb2.Adapter
    def __init__(self, adapter: _Optional[_Union[_generation_pb2.Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("num_sequences",)
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    num_sequences: int
    def __init__(self, num_sequences: _Optional[int] = ...) -> None: ...
