"""Any server under load: `outrider bench serve`."""
