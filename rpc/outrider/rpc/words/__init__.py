"""What requests, answers and vocabularies are: data alone, without gRPC, protobuf and torch, so that every root may
import it."""
