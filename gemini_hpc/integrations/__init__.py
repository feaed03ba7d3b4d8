"""Other training stacks, each with as little as it needs: `huggingface`, `lightning`, `fabric`, `accelerate`, `dcp`,
`torchtitan`, `megatron`."""
