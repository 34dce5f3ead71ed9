"""Which drafted tokens hold: rejection sampling and the Gumbel-max coupling, of chains and trees."""
