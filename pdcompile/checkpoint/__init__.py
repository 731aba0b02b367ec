"""Checkpoints: a training on disk, one shard a stage, complete or not there.

A folder holds the checkpoints of one training, each a folder of its own: a manifest (JSON), and for
every stage safetensors files with the weights under the model's names, the optimizer's state, and
what else a later minibatch needs.  Everything has a checksum, nothing is pickled.
"""
