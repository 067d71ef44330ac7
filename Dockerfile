# PyTorch and Triton for Blackwell come with the image.  docs/any_gpu.md has what other tags bring.
FROM nvcr.io/nvidia/pytorch:26.01-py3

COPY requirements.txt constraints.txt /tmp/
# What the image lacks gets the tested version.  What it brings keeps its own, unless a tested package
# needs a newer one: the image's PIP_CONSTRAINT would forbid that.  PyTorch and Triton are not asked
# for.  The image's Triton may be named pytorch-triton, and pip would install another one over it.
RUN cd /tmp \
    && pip list --format=freeze | tr '_.' '--' | sed -n 's/^\(.*\)==.*/^\1==/p' > brought.txt \
    && grep -ivf brought.txt constraints.txt > tested.txt \
    && grep -vE '^(torch|triton)>' requirements.txt > missing.txt \
    && PIP_CONSTRAINT= pip install --no-cache-dir -r missing.txt -c tested.txt \
    && rm brought.txt constraints.txt missing.txt requirements.txt tested.txt

WORKDIR /workspace
CMD ["bash"]
