"""The loop of a request between draft and target, and what chooses how far each may go."""
