"""Changes that the user makes between two calls: taken over, or refused."""
