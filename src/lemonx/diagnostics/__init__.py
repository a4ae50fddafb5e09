"""What can grow, what is broken, and why a growth is refused."""
