"""What a service that drafts hands to who makes weights of it, and the weights that come of that."""
