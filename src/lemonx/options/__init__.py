"""Every option of lemonx, declared once: Python keywords, command line, recipes and `--from` are derived from here."""
