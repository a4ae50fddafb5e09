"""What a person sees: tables, progress, results; one module a group of commands."""
