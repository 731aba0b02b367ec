"""Weights of models on the meta device, read from their source tensor by tensor.

A source is safetensors files, a function that fills one tensor at a time, or both.
"""
