# The demo, and every other command, in a container on the CPU. In a clone:
#   docker build --tag largemargin .
#   mkdir -p runs
#   docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD/runs:/work/runs" largemargin
# What stands after the name of the image is another command, as `largemargin list`:
#   docker run --rm largemargin list

FROM python:3.12-slim

# Without CUDA, from torch's own index; first, so that a change of the library does not fetch it again.
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu \
    'torch>=2.9' 'torchvision>=0.24'

COPY pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md CITATION.cff SECURITY.md /source/
COPY src /source/src
RUN pip install --no-cache-dir '/source[report]' && rm -r /source

# For any user: caches and runs go where all may write.
ENV HOME=/tmp
WORKDIR /work
RUN mkdir runs && chmod 777 runs

ENTRYPOINT ["largemargin"]
CMD ["demo"]
