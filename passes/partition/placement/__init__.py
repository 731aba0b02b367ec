"""Contiguous device placement: the smallest largest load, with its proof."""
