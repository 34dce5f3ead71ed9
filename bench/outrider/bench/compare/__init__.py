"""Every method of drafting on the same prompts: `outrider compare`."""
