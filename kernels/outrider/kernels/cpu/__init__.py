"""A decoder layer in C, how it is compiled and which library this processor takes."""
