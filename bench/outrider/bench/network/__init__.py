"""What the way between the services costs: `outrider bench network`."""
