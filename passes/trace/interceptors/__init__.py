"""Interceptors: mechanisms that see a call of the model before it is recorded."""
