# Motley on CPUs: docker build -t motley . && docker run -p 8080:8080 -v models:/models motley -hf USER/REPO
FROM python:3.13-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY CMakeLists.txt pyproject.toml README.md LICENSE ./
COPY csrc csrc
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.13-slim-bookworm
# The CPU build of torch is a tenth of the size of the one with CUDA.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "torch>=2.11" --index-url https://download.pytorch.org/whl/cpu && \
    pip install --no-cache-dir "$(echo /wheels/motley_llm-*.whl)[server,hub]" && \
    useradd --create-home --uid 1000 motley && install -d -o motley /models
ENV HF_HOME=/models
VOLUME /models
USER 1000
EXPOSE 8080
HEALTHCHECK --interval=30s --timeout=5s --start-period=10m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health')"]
ENTRYPOINT ["motley", "serve", "--host", "0.0.0.0", "--port", "8080"]
