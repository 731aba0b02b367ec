"""Parts of a stage: devices that share its values and tensors.

`shard` says which slice of a tensor a part holds, `conversions` brings values from one layout to
another.
"""
