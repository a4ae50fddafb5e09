"""What was written is loaded again from disk, by the public loader, and compared with the source."""
