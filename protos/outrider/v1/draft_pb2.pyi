from outrider.v1 import common_pb2 as _common_pb2
from outrider.v1 import generation_pb2 as _generation_pb2
from outrider.v1 import learning_pb2 as _learning_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProposeRequest(_message.Message):
    __slots__ = ("header", "messages")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.FrameHeader
    messages: _containers.RepeatedCompositeFieldContainer[DraftCommand]
    def __init__(self, header: _Optional[_Union[_common_pb2.FrameHeader, _Mapping]] = ..., messages: _Optional[_Iterable[_Union[DraftCommand, _Mapping]]] = ...) -> None: ...

class DraftCommand(_message.Message):
    __slots__ = ("open", "open_slice", "commit", "credit", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    OPEN_SLICE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: _common_pb2.Open
    open_slice: _common_pb2.OpenSlice
    commit: _common_pb2.Commit
    credit: _common_pb2.Credit
    close: _common_pb2.Close
    def __init__(self, open: _Optional[_Union[_common_pb2.Open, _Mapping]] = ..., open_slice: _Optional[_Union[_common_pb2.OpenSlice, _Mapping]] = ..., commit: _Optional[_Union[_common_pb2.Commit, _Mapping]] = ..., credit: _Optional[_Union[_common_pb2.Credit, _Mapping]] = ..., close: _Optional[_Union[_common_pb2.Close, _Mapping]] = ...) -> None: ...

class ProposeResponse(_message.Message):
    __slots__ = ("header", "messages")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.FrameHeader
    messages: _containers.RepeatedCompositeFieldContainer[DraftEvent]
    def __init__(self, header: _Optional[_Union[_common_pb2.FrameHeader, _Mapping]] = ..., messages: _Optional[_Iterable[_Union[DraftEvent, _Mapping]]] = ...) -> None: ...

class DraftEvent(_message.Message):
    __slots__ = ("piece", "closed", "failure")
    PIECE_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    piece: _common_pb2.Piece
    closed: _common_pb2.Closed
    failure: _common_pb2.Failure
    def __init__(self, piece: _Optional[_Union[_common_pb2.Piece, _Mapping]] = ..., closed: _Optional[_Union[_common_pb2.Closed, _Mapping]] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class ReloadModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ReloadModelResponse(_message.Message):
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

class PutVocabularyRequest(_message.Message):
    __slots__ = ("tokenizer_fingerprint", "num_bytes", "special_tokens", "data")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    tokenizer_fingerprint: str
    num_bytes: int
    special_tokens: _containers.ScalarMap[str, str]
    data: bytes
    def __init__(self, tokenizer_fingerprint: _Optional[str] = ..., num_bytes: _Optional[int] = ..., special_tokens: _Optional[_Mapping[str, str]] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutVocabularyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftVocabulary(_message.Message):
    __slots__ = ("tokenizer_fingerprint", "overlap", "greedy", "sampled")
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    GREEDY_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    tokenizer_fingerprint: str
    overlap: float
    greedy: str
    sampled: str
    def __init__(self, tokenizer_fingerprint: _Optional[str] = ..., overlap: _Optional[float] = ..., greedy: _Optional[str] = ..., sampled: _Optional[str] = ...) -> None: ...

class GetDraftInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDraftInfoResponse(_message.Message):
    __slots__ = ("model", "methods", "capabilities", "version", "default_methods", "vocabularies", "max_vocabulary_bytes", "info_version", "machine", "learned")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_METHODS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARIES_FIELD_NUMBER: _ClassVar[int]
    MAX_VOCABULARY_BYTES_FIELD_NUMBER: _ClassVar[int]
    INFO_VERSION_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    LEARNED_FIELD_NUMBER: _ClassVar[int]
    model: _generation_pb2.ModelInfo
    methods: _containers.RepeatedCompositeFieldContainer[_common_pb2.DraftMethod]
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    version: str
    default_methods: _containers.RepeatedScalarFieldContainer[str]
    vocabularies: _containers.RepeatedCompositeFieldContainer[DraftVocabulary]
    max_vocabulary_bytes: int
    info_version: int
    machine: str
    learned: _containers.RepeatedCompositeFieldContainer[_learning_pb2.LearnedDraft]
    def __init__(self, model: _Optional[_Union[_generation_pb2.ModelInfo, _Mapping]] = ..., methods: _Optional[_Iterable[_Union[_common_pb2.DraftMethod, _Mapping]]] = ..., capabilities: _Optional[_Iterable[str]] = ..., version: _Optional[str] = ..., default_methods: _Optional[_Iterable[str]] = ..., vocabularies: _Optional[_Iterable[_Union[DraftVocabulary, _Mapping]]] = ..., max_vocabulary_bytes: _Optional[int] = ..., info_version: _Optional[int] = ..., machine: _Optional[str] = ..., learned: _Optional[_Iterable[_Union[_learning_pb2.LearnedDraft, _Mapping]]] = ...) -> None: ...
