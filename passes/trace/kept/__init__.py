"""Captures that outlive the process: what they depend on, their file, and when it may be read."""
