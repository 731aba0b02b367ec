"""The devices and links of a torchrun job, measured, and the cluster that they make."""
