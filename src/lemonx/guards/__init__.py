"""What strangers hand in: how large it may be, and how it is shown."""
