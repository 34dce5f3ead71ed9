"""How drafts are made, one file per method."""
