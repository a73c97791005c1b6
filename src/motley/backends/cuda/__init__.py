"""The CUDA backend's parts: weights in planes and Triton kernels. Importing this package imports no Triton."""
