"""The laboratory: training, data, experiments, the methods that LEMON is compared with, and the survey.

lemonx works without it, and finds its commands and methods by entry points.
"""
