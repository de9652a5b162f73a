# The demo, and every other command, in a container. In a clone:
#   docker build --tag largemargin .
#   mkdir -p runs
#   docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD/runs:/work/runs" largemargin
# What stands after the name of the image is another command, as `largemargin list`:
#   docker run --rm largemargin list

FROM python:3.12-slim

# First, so that a change of the library does not fetch it again. torch comes with CUDA; for one
# without, 1.4 GB in place of 6: --build-arg INDEX=..., the address of torch's index of CPU builds.
ARG INDEX=
RUN pip install --no-cache-dir ${INDEX:+--index-url "$INDEX"} 'torch>=2.9' 'torchvision>=0.24'

COPY pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md CITATION.cff SECURITY.md /source/
COPY src /source/src
RUN pip install --no-cache-dir '/source[report]' && rm -r /source

# For any user: caches and runs go where all may write.
ENV HOME=/tmp
WORKDIR /work
RUN mkdir runs && chmod 777 runs

ENTRYPOINT ["largemargin"]
CMD ["demo"]
