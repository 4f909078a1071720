"""Tables, figures and pages made from run folders."""

import os

os.environ.pop("MPLBACKEND", None)  # a notebook's need not exist here, and figures need none
