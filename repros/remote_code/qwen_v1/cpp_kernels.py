"""A file that modeling_qwen_published.py names in a relative import, so that transformers demands it.

The published one builds a CUDA extension for the quantised cache; no case turns that on.
"""

cache_autogptq_cuda_256 = None
