# The embedded pair as an image volume: the folders target and draft, and nothing that runs.
FROM scratch
COPY outrider-pair-python/outrider_pair_python/target /target
COPY outrider-pair-python/outrider_pair_python/draft /draft
