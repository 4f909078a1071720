"""The report of one run, its pictures, and what other tau and rho would mix."""

import os

os.environ.pop("MPLBACKEND", None)  # a notebook's need not exist here, and figures need none
