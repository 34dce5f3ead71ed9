from google.rpc import status_pb2 as _status_pb2
from outrider.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FrameHeader(_message.Message):
    __slots__ = ("number", "last_seen", "held_us", "step_age_ms", "draining", "info_version")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_FIELD_NUMBER: _ClassVar[int]
    HELD_US_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    INFO_VERSION_FIELD_NUMBER: _ClassVar[int]
    number: int
    last_seen: int
    held_us: int
    step_age_ms: int
    draining: bool
    info_version: int
    def __init__(self, number: _Optional[int] = ..., last_seen: _Optional[int] = ..., held_us: _Optional[int] = ..., step_age_ms: _Optional[int] = ..., draining: bool = ..., info_version: _Optional[int] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("sequence_id", "num_prompt_ids", "num_output_ids", "prompt_ids", "output_ids", "fork_of", "completion", "sampling", "acceptance", "seed", "timeout_ms", "first_chain", "priority", "salt", "traceparent", "one_hot", "method", "model_digest", "suspect", "tokenizer_fingerprint", "prediction", "num_prediction_ids", "methods", "draft_confidence", "reasoning", "plain", "adapter", "media", "resumed", "fresh_seed", "caller")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    FORK_OF_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHAIN_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ONE_HOT_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    NUM_PREDICTION_IDS_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    FRESH_SEED_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    num_prompt_ids: int
    num_output_ids: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    fork_of: int
    completion: int
    sampling: _generation_pb2.SamplingParams
    acceptance: _generation_pb2.AcceptanceRule
    seed: int
    timeout_ms: int
    first_chain: int
    priority: int
    salt: str
    traceparent: str
    one_hot: bool
    method: str
    model_digest: str
    suspect: bool
    tokenizer_fingerprint: str
    prediction: _containers.RepeatedScalarFieldContainer[int]
    num_prediction_ids: int
    methods: _containers.RepeatedScalarFieldContainer[str]
    draft_confidence: float
    reasoning: Reasoning
    plain: bool
    adapter: str
    media: _containers.RepeatedCompositeFieldContainer[MediaInfo]
    resumed: bool
    fresh_seed: bool
    caller: str
    def __init__(self, sequence_id: _Optional[int] = ..., num_prompt_ids: _Optional[int] = ..., num_output_ids: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ..., fork_of: _Optional[int] = ..., completion: _Optional[int] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., acceptance: _Optional[_Union[_generation_pb2.AcceptanceRule, str]] = ..., seed: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., first_chain: _Optional[int] = ..., priority: _Optional[int] = ..., salt: _Optional[str] = ..., traceparent: _Optional[str] = ..., one_hot: bool = ..., method: _Optional[str] = ..., model_digest: _Optional[str] = ..., suspect: bool = ..., tokenizer_fingerprint: _Optional[str] = ..., prediction: _Optional[_Iterable[int]] = ..., num_prediction_ids: _Optional[int] = ..., methods: _Optional[_Iterable[str]] = ..., draft_confidence: _Optional[float] = ..., reasoning: _Optional[_Union[Reasoning, _Mapping]] = ..., plain: bool = ..., adapter: _Optional[str] = ..., media: _Optional[_Iterable[_Union[MediaInfo, _Mapping]]] = ..., resumed: bool = ..., fresh_seed: bool = ..., caller: _Optional[str] = ...) -> None: ...

class MediaInfo(_message.Message):
    __slots__ = ("mime_type", "num_bytes", "sha256")
    MIME_TYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    mime_type: str
    num_bytes: int
    sha256: bytes
    def __init__(self, mime_type: _Optional[str] = ..., num_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class Reasoning(_message.Message):
    __slots__ = ("end_ids", "start_ids", "max_tokens", "open")
    END_IDS_FIELD_NUMBER: _ClassVar[int]
    START_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    end_ids: _containers.RepeatedScalarFieldContainer[int]
    start_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    open: bool
    def __init__(self, end_ids: _Optional[_Iterable[int]] = ..., start_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., open: bool = ...) -> None: ...

class OpenSlice(_message.Message):
    __slots__ = ("sequence_id", "ids", "media")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    media: bytes
    def __init__(self, sequence_id: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., media: _Optional[bytes] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("sequence_id",)
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    def __init__(self, sequence_id: _Optional[int] = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ("sequence_id",)
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    def __init__(self, sequence_id: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("sequence_id", "status")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    status: _status_pb2.Status
    def __init__(self, sequence_id: _Optional[int] = ..., status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class TokenWeights(_message.Message):
    __slots__ = ("ids", "weights")
    IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    weights: bytes
    def __init__(self, ids: _Optional[bytes] = ..., weights: _Optional[bytes] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("sequence_id", "chain", "parent", "position", "ids", "weights", "more", "parents", "draft_us", "method")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    chain: int
    parent: int
    position: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedCompositeFieldContainer[TokenWeights]
    more: bool
    parents: _containers.RepeatedScalarFieldContainer[int]
    draft_us: int
    method: str
    def __init__(self, sequence_id: _Optional[int] = ..., chain: _Optional[int] = ..., parent: _Optional[int] = ..., position: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[_Union[TokenWeights, _Mapping]]] = ..., more: bool = ..., parents: _Optional[_Iterable[int]] = ..., draft_us: _Optional[int] = ..., method: _Optional[str] = ...) -> None: ...

class DraftMethod(_message.Message):
    __slots__ = ("name", "needs_features", "can_run_ahead", "learns", "step_costs")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FEATURES_FIELD_NUMBER: _ClassVar[int]
    CAN_RUN_AHEAD_FIELD_NUMBER: _ClassVar[int]
    LEARNS_FIELD_NUMBER: _ClassVar[int]
    STEP_COSTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    needs_features: bool
    can_run_ahead: bool
    learns: bool
    step_costs: _containers.RepeatedCompositeFieldContainer[StepCost]
    def __init__(self, name: _Optional[str] = ..., needs_features: bool = ..., can_run_ahead: bool = ..., learns: bool = ..., step_costs: _Optional[_Iterable[_Union[StepCost, _Mapping]]] = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("num_rows", "step_us")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    step_us: int
    def __init__(self, num_rows: _Optional[int] = ..., step_us: _Optional[int] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("sequence_id", "until", "max_window", "patience_ms", "max_branches")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    MAX_WINDOW_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    until: int
    max_window: int
    patience_ms: int
    max_branches: int
    def __init__(self, sequence_id: _Optional[int] = ..., until: _Optional[int] = ..., max_window: _Optional[int] = ..., patience_ms: _Optional[int] = ..., max_branches: _Optional[int] = ...) -> None: ...

class StepTimings(_message.Message):
    __slots__ = ("queue_us", "verify_us", "sample_us", "num_rows", "num_sequences", "draft_us", "mask_us", "compile_us", "num_woken")
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    VERIFY_US_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_US_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    MASK_US_FIELD_NUMBER: _ClassVar[int]
    COMPILE_US_FIELD_NUMBER: _ClassVar[int]
    NUM_WOKEN_FIELD_NUMBER: _ClassVar[int]
    queue_us: int
    verify_us: int
    sample_us: int
    num_rows: int
    num_sequences: int
    draft_us: int
    mask_us: int
    compile_us: int
    num_woken: int
    def __init__(self, queue_us: _Optional[int] = ..., verify_us: _Optional[int] = ..., sample_us: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_sequences: _Optional[int] = ..., draft_us: _Optional[int] = ..., mask_us: _Optional[int] = ..., compile_us: _Optional[int] = ..., num_woken: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "free_blocks")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    free_blocks: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_blocks: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("sequence_id", "position", "chain", "num_drafted", "num_accepted", "ids", "origins", "logprobs", "finish_reason", "stop_token_id", "dropped", "timings", "load", "num_cached_ids", "num_forced")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORCED_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    position: int
    chain: int
    num_drafted: int
    num_accepted: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    origins: _containers.RepeatedScalarFieldContainer[_generation_pb2.TokenOrigin]
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.PositionLogprobs]
    finish_reason: _generation_pb2.FinishReason
    stop_token_id: int
    dropped: _containers.RepeatedScalarFieldContainer[int]
    timings: StepTimings
    load: Load
    num_cached_ids: int
    num_forced: int
    def __init__(self, sequence_id: _Optional[int] = ..., position: _Optional[int] = ..., chain: _Optional[int] = ..., num_drafted: _Optional[int] = ..., num_accepted: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., origins: _Optional[_Iterable[_Union[_generation_pb2.TokenOrigin, str]]] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.PositionLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., dropped: _Optional[_Iterable[int]] = ..., timings: _Optional[_Union[StepTimings, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., num_cached_ids: _Optional[int] = ..., num_forced: _Optional[int] = ...) -> None: ...
