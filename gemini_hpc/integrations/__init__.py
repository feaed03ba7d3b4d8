"""Adapters for other training stacks, each as small as possible.

The stacks are `huggingface`, `lightning`, `fabric`, `accelerate`, `dcp`, `torchtitan` and `megatron`.
"""
