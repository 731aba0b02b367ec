"""What the user changes between two calls: taken over, or refused."""
