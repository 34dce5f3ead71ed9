"""Generated protocol stubs of the package outrider.v1."""
