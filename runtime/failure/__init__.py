"""When a rank fails: who failed first, how it ended, and whether all make the same call."""
