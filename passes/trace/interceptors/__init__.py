"""Interceptors: what sees a call of the model before it is recorded."""
