"""OFA for visual entailment in plain torch: configuration, network, tokenizer, preprocessing, decoding, loading.

This package imports only torch, numpy, pillow, tokenizers and safetensors, so that it runs on a machine that has
nothing else of the project's dependencies installed.
"""
