"""Parts of a stage: which dimensions are the same, how ops divide, what each part computes."""
