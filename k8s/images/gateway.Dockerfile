# From the repository's root, after k8s/images/wheelhouse.sh, without a network:
#   docker build --network none -f k8s/images/gateway.Dockerfile --build-context wheelhouse=build/wheelhouse -t outrider-gateway .
ARG PYTHON=python:3.11
ARG RUNTIME=python:3.11-slim
FROM ${PYTHON} AS layers
COPY k8s/images/layers.sh /layers.sh
RUN --mount=type=bind,from=wheelhouse,target=/wheelhouse /layers.sh gateway /wheelhouse /app

FROM ${RUNTIME}
COPY --from=layers /app /app
ENV PYTHONPATH=/app LD_LIBRARY_PATH=/app/lib PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HF_HUB_OFFLINE=1 XDG_CACHE_HOME=/tmp/cache
USER 10001:10001
EXPOSE 50050 8000 50060 9090
ENTRYPOINT ["python", "-m", "outrider.gateway"]
