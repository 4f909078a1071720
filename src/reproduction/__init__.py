"""The experiments of the TokenMixup paper: configuration, data, models, training and reports."""
