from outrider.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LearnRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LearnResponse(_message.Message):
    __slots__ = ("lessons", "num_lost", "model_digest", "learned", "max_learned", "max_rank")
    LESSONS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LEARNED_FIELD_NUMBER: _ClassVar[int]
    MAX_LEARNED_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    lessons: _containers.RepeatedCompositeFieldContainer[Lesson]
    num_lost: int
    model_digest: str
    learned: _containers.RepeatedCompositeFieldContainer[LearnedDraft]
    max_learned: int
    max_rank: int
    def __init__(self, lessons: _Optional[_Iterable[_Union[Lesson, _Mapping]]] = ..., num_lost: _Optional[int] = ..., model_digest: _Optional[str] = ..., learned: _Optional[_Iterable[_Union[LearnedDraft, _Mapping]]] = ..., max_learned: _Optional[int] = ..., max_rank: _Optional[int] = ...) -> None: ...

class Lesson(_message.Message):
    __slots__ = ("target_digest", "group", "prompt_ids", "output_ids", "num_given", "sampling", "acceptance", "seed", "completion", "caller")
    TARGET_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_GIVEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    target_digest: str
    group: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    num_given: int
    sampling: _generation_pb2.SamplingParams
    acceptance: _generation_pb2.AcceptanceRule
    seed: int
    completion: int
    caller: str
    def __init__(self, target_digest: _Optional[str] = ..., group: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ..., num_given: _Optional[int] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., acceptance: _Optional[_Union[_generation_pb2.AcceptanceRule, str]] = ..., seed: _Optional[int] = ..., completion: _Optional[int] = ..., caller: _Optional[str] = ...) -> None: ...

class PutLearnedRequest(_message.Message):
    __slots__ = ("target_digest", "group", "path", "left_out")
    TARGET_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    target_digest: str
    group: str
    path: str
    left_out: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, target_digest: _Optional[str] = ..., group: _Optional[str] = ..., path: _Optional[str] = ..., left_out: _Optional[_Iterable[str]] = ...) -> None: ...

class PutLearnedResponse(_message.Message):
    __slots__ = ("before", "after", "load_ms", "pause_ms", "num_sequences")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    before: str
    after: str
    load_ms: int
    pause_ms: int
    num_sequences: int
    def __init__(self, before: _Optional[str] = ..., after: _Optional[str] = ..., load_ms: _Optional[int] = ..., pause_ms: _Optional[int] = ..., num_sequences: _Optional[int] = ...) -> None: ...

class LearnedDraft(_message.Message):
    __slots__ = ("target_digest", "group", "digest", "left_out")
    TARGET_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    target_digest: str
    group: str
    digest: str
    left_out: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, target_digest: _Optional[str] = ..., group: _Optional[str] = ..., digest: _Optional[str] = ..., left_out: _Optional[_Iterable[str]] = ...) -> None: ...
