"""The folders of the embedded pair `python`, which outrider.pairs finds."""

TRAINED_ON = "the sources of Python's standard library"  # and nothing else
