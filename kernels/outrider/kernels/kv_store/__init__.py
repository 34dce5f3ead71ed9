"""Writing keys and values into the paged cache."""
