"""Low-rank adapters of a model: read from PEFT's layout, and held on the device as far as there is room."""
