"""What CUDA kernels allocate beside their results, in lines of (bytes an element, elements)."""

from __future__ import annotations

Line = tuple[int, str]

CUBLAS_BYTES = 4096 * 8 * 1024
"""Of each cuBLAS handle on Hopper, inside the caching allocator (ATen/cuda/CublasHandlePool.cpp); one handle per
thread that multiplies, which are the main thread and autograd's."""

CUDNN_BYTES = 256
"""Beside the lines of `attention_backward`, in the same block."""

SORTED_ABOVE, ROWS_OF_A_THREAD = 3072, 10
NORM_CHUNK = 65536
COPIED_BYTES = 2048


def attention_backward(element: int, *, grouped: bool, of_queries: int = 1, of_keys: int = 1) -> list[Line]:
    """cuDNN's, for one in `of_queries` queries and one in `of_keys` keys: a float32 accumulator for dq, 4 bytes a row,
    and with fewer key than query heads dk and dv for every query head before they are summed (H200: 270,532,864 bytes
    = 8·T·d + 4·T·H + 256 at T 16384, d 2048, H 32)."""
    lines = [(4 // of_queries, "T·H/t"), (4 // of_queries, "T·d/t")]
    return [*lines, (2 * element // of_keys, "T·d/t")] if grouped else lines


def embedding_backward(tokens: int, rows: int) -> list[Line]:
    """Float32 sums of sorted segments of at most 10 tokens, a row each; none up to 3072 tokens
    (ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu `max_partial_segment`)."""
    if tokens <= SORTED_ABOVE:
        return []
    return [(4 * (tokens // ROWS_OF_A_THREAD), "d"), (4, "T·d" if tokens < rows else "V·d")]


def gradient_norms(largest: int) -> list[Line]:
    """A norm of each 65536 elements, for every tensor as many as the one of `largest` elements has
    (ATen/native/cuda/ForeachReduceOp.cu `foreach_tensor_norm_cuda`)."""
    return [(4 * -(-largest // NORM_CHUNK), "tensors")]


def reduce_scatter_input(shard_bytes: int) -> list[Line]:
    """Where each block of the kernel that fills it copies from: 8 bytes for each 2048 of a rank's part
    (ATen/native/cuda/TensorShape.cu `_chunk_cat_out_cuda`)."""
    return [(8 * -(-shard_bytes // COPIED_BYTES), "1")]
