"""Quantized weights: recipes, the quantizer, the Linears that run them, the file they are kept in, and error reports.

`quantize.quantize` writes a quantized copy of a checkpoint, `worker.model.checkpoint.load` loads it like any other, and
`replay.load_gated` also makes sure that this machine computes with it what was computed when it was made.
"""
