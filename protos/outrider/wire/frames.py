"""The framing of the draft and target streams, without I/O: what packs messages into frames and what takes them out.
`FramePacker` and `FrameAssembler` of one side share a `SequenceTable`."""

from outrider.wire.codec_frames import DRAFT_STREAM, TARGET_STREAM, Direction, Message, StreamKind
from outrider.wire.frame_assembler import FrameAssembler, Received
from outrider.wire.frame_packer import MAX_FRAME_BYTES, FramePacker
from outrider.wire.sequence_table import IdRanges, SequenceState, SequenceTable

__all__ = [
    "DRAFT_STREAM",
    "MAX_FRAME_BYTES",
    "TARGET_STREAM",
    "Direction",
    "FrameAssembler",
    "FramePacker",
    "IdRanges",
    "Message",
    "Received",
    "SequenceState",
    "SequenceTable",
    "StreamKind",
]
