"""Tools that a model may call: what a request says of them, how checkpoints write calls, and grammars of these."""
