"""What a round costs a gateway process: `outrider bench gateway`."""
