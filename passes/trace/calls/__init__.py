"""What calls of a model leave behind, and whether a later call could tell."""
