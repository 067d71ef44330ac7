# PyTorch and Triton for Blackwell come with the image; requirements.txt asks for nothing newer.
FROM nvcr.io/nvidia/pytorch:26.01-py3

COPY requirements.txt /tmp/requirements.txt
RUN pip install --no-cache-dir -r /tmp/requirements.txt && rm /tmp/requirements.txt

WORKDIR /workspace
CMD ["bash"]
