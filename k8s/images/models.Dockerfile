# The embedded pair as an image volume: the folders target and draft, and nothing that runs.
FROM scratch
COPY models/outrider/pairs/python/ /
