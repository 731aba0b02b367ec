"""The machines that are here: what they have, how fast they are, and how they are joined."""
