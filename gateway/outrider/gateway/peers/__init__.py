"""Drafts and targets as the gateway sees them: addresses, replicas, what they agree on."""
