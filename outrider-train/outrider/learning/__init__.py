"""A draft learns from the traffic that it serves: `outrider learn`."""
