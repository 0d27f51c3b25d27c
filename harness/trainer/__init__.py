"""The instrumented trainer: a Llama decoder under FSDP2 × tensor/sequence parallelism, on gloo or NCCL.

It knows the recorder, and nothing of the analysis of recordings.
"""
