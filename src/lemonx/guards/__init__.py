"""Input from others: how large it may be, and how it is printed safely."""
