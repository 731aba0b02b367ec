"""Integrations: a training with pipelines in the tools of others."""
